"""What all packages use: units, the text form of names, plugins, files, signals. Nothing here imports torch."""
