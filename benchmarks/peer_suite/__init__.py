"""What benchmarks/peers.py is made of."""
