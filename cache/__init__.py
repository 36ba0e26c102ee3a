"""What is remembered, by number: KV blocks, state slots and the prefix keys that name them."""
