"""`python -m runtime bench`: how long each engine and the whole chain take, beside the roofline."""
