#!/bin/bash

module load cray-python/3.11.7
module load cuda/12.6
#verify module load
module list

source /home/users/<your-username>/ddpTest/myenv/bin/activate
python /home/users/<your-username>/ddpTest/single_gpu.py 10 2
deactivate
