"""What must hold for every algorithm, whatever the batch: proved with drawn batches (hypothesis), mostly in float64."""
