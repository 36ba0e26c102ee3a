"""What is remembered, by number: KV blocks, recurrent-state slots and the prefix keys that name them."""
