"""The same maths in the engines' layout, and its way to ONNX."""
