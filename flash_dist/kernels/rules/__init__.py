"""What torch asks about operators beside their kernels: operations, and shards of their tensors."""
