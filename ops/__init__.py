"""What PyTorch sees: torch.library ops with their checks, fakes and plain references."""
