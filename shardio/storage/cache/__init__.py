"""A cache of remote objects on a local disk, which the processes and jobs of one machine share."""
