"""The adapters: our calls with the names and the arguments of the modules that other projects' tests import."""
