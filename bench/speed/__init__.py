"""Time of a block and of the model beside transformers and the machine's limits."""
