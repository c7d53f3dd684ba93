"""Which of the long tests a run takes: those whose sources changed, and of the others as many as the day chooses.

What every run has, however long, is not named here: kills of the whole demo, a crash at each commit of the ledger, the
hostile programs. `make test-nightly` takes all, and so does a call that names the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.budget import day, sampled

_LIFECYCLE = "tests/integration/orchestrator/lifecycle"

# Whole platforms, of 60 to 230 CPU s each, and what each alone looks at.
PLATFORMS: dict[str, tuple[str, ...]] = {
    "tests/e2e/test_redis_comes_back_empty.py": ("services/orchestrator/recovery.py", "spo/service/state.py"),
    "tests/e2e/test_trainer_ranks.py": ("services/trainer/ranks.py", "services/trainer/deepspeed_engine.py"),
    "tests/e2e/test_two_trainers.py": ("services/trainer/lease.py", "services/orchestrator/leases.py"),
    "tests/e2e/test_readme.py": ("README.md",),
    "tests/e2e/live/test_agents_play.py": (
        "services/orchestrator/agents.py",
        "services/orchestrator/agent_episodes.py",
    ),
    "tests/e2e/live/test_verifiers.py": ("services/verifier",),
    "tests/e2e/live/test_what_people_say.py": (
        "services/orchestrator/capture.py",
        "services/orchestrator/continual.py",
    ),
    "tests/e2e/live/test_live_command_line.py": ("spo/cli",),
    "tests/e2e/live/test_live_sight.py": ("spo/observability.py", "services/orchestrator/monitor.py"),
    "tests/e2e/live/test_notebook.py": ("docs/examples", "spo/client"),
    "tests/e2e/live/test_tutorials_that_train.py": ("docs/tutorials", "spo/cli/start.py"),
}
PLATFORMS_A_DAY = 1

# Tests of 20 to 80 CPU s with processes, engines and ranks of their own, by name without parameters; a file where one
# pair of ranks serves all of its tests.
LONG: dict[str, tuple[str, ...]] = {
    "tests/integration/trainer/test_process.py::test_two_ranks_at_zero_stage_2_learn_what_one_rank_learns": (
        "services/trainer/ranks.py",
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_process.py::"
    "test_a_pod_that_is_told_to_go_takes_the_whole_trainer_through_a_slow_checkpoint": ("services/trainer/loop.py",),
    "tests/integration/trainer/test_faults_on_one_rank.py::"
    "test_all_ranks_refuse_what_one_cannot_learn_from_and_none_waits_for_another": ("services/trainer/ranks.py",),
    "tests/integration/trainer/test_faults_on_one_rank.py::"
    "test_storage_that_fails_on_one_rank_ends_no_wait_by_its_timeout_and_counts_as_no_death": (
        "services/trainer/checkpoints.py",
    ),
    "tests/integration/trainer/test_partitioned_loading.py::"
    "test_two_ranks_hold_half_of_the_model_each_and_never_more_than_a_tensor_beside_it": (
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_world_size.py": (
        "services/trainer/checkpoints.py",
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_sequence_parallel.py": (
        "services/trainer/batches.py",
        "services/trainer/learner.py",
        "services/trainer/ranks.py",
    ),
    "tests/integration/trainer/test_engine.py::test_what_the_cpu_holds_for_the_device_learns_the_same": (
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_engine.py::test_a_closed_engine_frees_its_model_and_optimiser": (
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_engine.py::test_layers_that_run_twice_learn_the_same_from_less_memory": (
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_engine.py::test_gradients_are_added_up_in_float32_where_that_is_asked_for": (
        "services/trainer/deepspeed_engine.py",
    ),
    "tests/integration/trainer/test_lora.py::test_only_the_adapter_learns_and_is_stored_at_every_zero_stage": (
        "services/trainer/weights.py",
    ),
    "tests/integration/inference/test_model_shapes.py::test_trainer_and_engine_agree_before_and_after_training": (
        "tests/integration/inference/model_shapes.py",
    ),
    "tests/integration/inference/test_tensor_parallel.py::"
    "test_two_workers_sample_what_one_model_does_by_file_and_by_broadcast_and_the_death_of_one_is_told": (
        "services/inference/engine.py",
        "services/inference/weights.py",
    ),
    "tests/integration/inference/test_service.py::test_generate_answers_with_whole_trajectories": (
        "services/inference/service.py",
    ),
    "tests/integration/inference/test_service.py::test_a_killed_replica_loses_nothing_and_a_stopped_one_ends_cleanly": (
        "services/inference/rollouts.py",
    ),
    f"{_LIFECYCLE}/test_model_check.py::"
    "test_a_tool_parser_that_does_not_read_what_the_template_writes_is_refused_by_its_field": ("spo/model/chat.py",),
    f"{_LIFECYCLE}/test_trainer_deaths.py::"
    "test_a_real_trainer_without_memory_is_told_at_the_first_restart_and_ends_the_job_by_name": (
        "services/trainer/lease.py",
    ),
    "tests/integration/orchestrator/http/pages/test_every_page_in_a_browser.py::"
    "test_pages_are_accessible_and_silent_and_keep_markup_harmless": ("services/orchestrator/http/pages",),
    "tests/integration/orchestrator/http/test_command_line_live.py::"
    "test_what_is_shown_to_people_is_also_there_for_programs": ("spo/cli",),
    "tests/integration/orchestrator/http/test_process.py::"
    "test_canary_secrets_of_requests_appear_in_no_log_metric_event_or_trace": ("spo/observability.py",),
    "tests/integration/orchestrator/test_leadership.py::"
    "test_a_stopped_leader_that_wakes_up_ends_and_its_next_life_is_standby": ("services/orchestrator/commit.py",),
    "tests/integration/orchestrator/test_leadership.py::"
    "test_a_standby_says_who_leads_and_takes_over_from_one_that_is_killed": ("services/orchestrator/commit.py",),
    "tests/integration/orchestrator/replicas/test_autoscaling.py::"
    "test_pools_follow_a_step_go_to_zero_and_back_and_stay_calm_under_a_constant_load": (
        "services/orchestrator/autoscaling.py",
    ),
    "tests/integration/local/test_launcher_children.py::test_a_platform_whose_services_keep_dying_says_which_and_why": (
        "spo/local",
    ),
    "tests/integration/tinker/test_tinker_package.py::"
    "test_the_package_trains_samples_saves_and_goes_on_after_the_service_was_killed": ("services/orchestrator/http",),
    "tests/integration/failover/test_sentinels.py::test_clients_follow_the_primary_and_what_was_replicated_is_there": (
        "spo/messaging/redis_client.py",
    ),
    "tests/integration/replay_buffer/test_shared.py::test_killed_services_take_over_every_rollout_once": (
        "services/replay_buffer",
    ),
    "tests/integration/replay_buffer/test_archiver.py::"
    "test_a_spiller_killed_at_any_time_loses_nothing_and_doubles_nothing": ("services/replay_buffer",),
    "tests/integration/replay_buffer/test_soak.py::"
    "test_redis_holds_a_window_and_no_more_while_trajectories_stream_in": ("services/replay_buffer",),
    "tests/integration/cli/test_commands_of_images.py::test_every_command_and_every_module_of_its_roles_starts": (
        "deploy/Dockerfile.light",
        "spo/cli",
    ),
    "tests/integration/cli/test_commands_of_images.py::test_the_doctor_of_an_image_names_what_is_not_there": (
        "spo/doctor.py",
    ),
    "tests/integration/cli/test_judge_command.py::test_the_doctor_names_the_tier_and_why_a_floor_is_not_met": (
        "spo/doctor.py",
    ),
    "tests/integration/doctor/test_doctor.py::test_the_platform_that_commands_would_ask_is_looked_at": (
        "spo/doctor.py",
    ),
    "tests/integration/doctor/test_doctor.py::test_a_redis_that_is_away_is_named_without_its_password": (
        "spo/doctor.py",
    ),
    "tests/integration/doctor/test_doctor.py::test_each_finding_explains_itself_and_a_sound_redis_is_well": (
        "spo/doctor.py",
    ),
    "tests/chaos/test_instruments.py::test_a_preloaded_clock_steps_while_monotonic_time_goes_on": ("tests/chaos",),
}
LONG_A_DAY = 6

CHOSEN = {
    name
    for table, count in ((PLATFORMS, PLATFORMS_A_DAY), (LONG, LONG_A_DAY))
    for name in sampled(list(table), count, lambda name, table=table: (name.partition("::")[0], *table[name]))
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is neither of the day nor changed."""
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    for item in items:
        test = item.nodeid.partition("[")[0]
        long = {test, test.partition("::")[0]} & {*LONG, *PLATFORMS}
        if long - CHOSEN and item.path.name not in named:
            item.add_marker(pytest.mark.skip(reason=f"not in the sample of {day()}"))
