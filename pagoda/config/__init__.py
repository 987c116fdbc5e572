"""Every setting, defined once: `pagoda.wrap`, the command line, run files and the documentation read these classes."""
