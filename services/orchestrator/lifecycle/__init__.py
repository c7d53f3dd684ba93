"""What moves a job from its submission to its end: queue, runner, prompt dispatch, forks, alarms, deletion."""
