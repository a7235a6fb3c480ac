"""What stands in for the modules that other projects' tests import: our calls under their names and in their order."""
