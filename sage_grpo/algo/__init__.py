"""The method as pure maths: tensors in, tensors out. Imports nothing but torch and the standard library."""
