"""What goes with what, from driver and CUDA over torch and NCCL to the network, judged from data with sources."""
