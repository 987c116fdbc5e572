"""All settings, each defined once: `pagoda.wrap`, the command line, run files and the documentation use these
classes."""
