"""What families of algorithms share: critics, soft actor-critics, TD3, learning inside the data. An algorithm's file is its difference."""
