"""The rules of `bench lint`: the public generator functions of the modules in this package."""
