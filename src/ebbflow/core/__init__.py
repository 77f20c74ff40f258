"""What every package uses: units, the text form of names, files, signals. Nothing here imports torch."""
