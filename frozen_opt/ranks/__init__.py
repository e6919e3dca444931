"""What ranks tell each other: through the store around a factory, by collectives while a run goes on."""
