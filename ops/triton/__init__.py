"""Small Triton kernels around the KDA recurrence."""
