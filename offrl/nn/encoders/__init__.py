"""What makes one vector of images and several streams, for all networks or inside each."""
