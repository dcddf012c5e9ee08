from setuptools import find_packages, setup

BASE = ["torch>=2.4", "numpy"]
EXTRAS = {"gpu": ["nvidia-nccl-cu12"], "test": ["pytest"]}

setup(
    name="my_train",
    version="1.0",
    packages=find_packages(),
    python_requires=">=3.10",
    install_requires=BASE,
    extras_require={**EXTRAS, "all": EXTRAS["gpu"] + EXTRAS["test"]},
)
