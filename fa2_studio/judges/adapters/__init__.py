"""The adapters, which offer our calls under the names and with the arguments that other projects' tests import."""
