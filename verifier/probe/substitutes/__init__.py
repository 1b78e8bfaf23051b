"""What stands in the place of something that the script asks for, so that its run can be compared or can run here at all."""
