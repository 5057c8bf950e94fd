"""What goes over the wires of every door: frames, codes and the two ends' view of a connection."""
