"""The method as pure math: tensors in, tensors out. Imports only torch and the standard library."""
