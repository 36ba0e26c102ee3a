"""The model and the program around it: config, layers, weights, engine, command line."""
