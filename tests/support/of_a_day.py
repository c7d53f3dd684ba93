"""Which of the long tests a run takes: those whose sources changed, and of the others as many as the day chooses.

What every run has, however long, is not named here: kills of the whole demo, a crash at each commit of the ledger, the
ledger against a dictionary, hostile programs. `make test-nightly` takes all, and so does a call that names the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.budget import day, sampled

_TRAINER = "tests/integration/trainer"
_ORCHESTRATOR = "tests/integration/orchestrator"
_LIFECYCLE = f"{_ORCHESTRATOR}/lifecycle"
_JUDGE = "tests/integration/sandbox_judge"

# Whole platforms, of 60 to 230 CPU s each, and what each alone looks at.
PLATFORMS: dict[str, tuple[str, ...]] = {
    "tests/e2e/test_redis_comes_back_empty.py": ("services/orchestrator/recovery.py", "spo/service/state.py"),
    "tests/e2e/test_trainer_ranks.py": ("services/trainer/ranks.py", "services/trainer/deepspeed_engine.py"),
    "tests/e2e/test_two_trainers.py": ("services/trainer/lease.py", "services/orchestrator/leases.py"),
    "tests/e2e/test_readme.py": ("README.md",),
    "tests/e2e/live/test_methods.py": ("spo/algorithm", "services/trainer/learner.py"),
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
    "tests/e2e/test_demo_survives_kills.py::test_after_ten_kills_the_memory_of_a_job_is_what_its_ledger_says": (
        "services/replay_buffer",
    ),
    f"{_TRAINER}/test_process.py::test_two_ranks_at_zero_stage_2_learn_what_one_rank_learns": (
        "services/trainer/ranks.py",
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_process.py::test_a_pod_that_is_told_to_go_takes_the_whole_trainer_through_a_slow_checkpoint": (
        "services/trainer/loop.py",
    ),
    f"{_TRAINER}/test_faults_on_one_rank.py::"
    "test_all_ranks_refuse_what_one_cannot_learn_from_and_none_waits_for_another": ("services/trainer/ranks.py",),
    f"{_TRAINER}/test_faults_on_one_rank.py::"
    "test_storage_that_fails_on_one_rank_ends_no_wait_by_its_timeout_and_counts_as_no_death": (
        "services/trainer/checkpoints.py",
    ),
    f"{_TRAINER}/test_partitioned_loading.py::"
    "test_two_ranks_hold_half_of_the_model_each_and_never_more_than_a_tensor_beside_it": (
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_world_size.py": (
        "services/trainer/checkpoints.py",
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_sequence_parallel.py": (
        "services/trainer/batches.py",
        "services/trainer/learner.py",
        "services/trainer/ranks.py",
    ),
    f"{_TRAINER}/test_engine.py::test_what_the_cpu_holds_for_the_device_learns_the_same": (
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_engine.py::test_a_closed_engine_frees_its_model_and_optimiser": (
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_engine.py::test_layers_that_run_twice_learn_the_same_from_less_memory": (
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_engine.py::test_gradients_are_added_up_in_float32_where_that_is_asked_for": (
        "services/trainer/deepspeed_engine.py",
    ),
    f"{_TRAINER}/test_lora.py::test_only_the_adapter_learns_and_is_stored_at_every_zero_stage": (
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
    f"{_ORCHESTRATOR}/http/pages/test_every_page_in_a_browser.py::"
    "test_pages_are_accessible_and_silent_and_keep_markup_harmless": ("services/orchestrator/http/pages",),
    f"{_ORCHESTRATOR}/http/pages/test_every_page_in_a_browser.py::"
    "test_a_jobs_page_is_accessible_in_every_state_and_at_every_width": ("services/orchestrator/http/pages",),
    f"{_ORCHESTRATOR}/http/test_command_line_live.py::test_what_is_shown_to_people_is_also_there_for_programs": (
        "spo/cli",
    ),
    f"{_ORCHESTRATOR}/http/test_process.py::test_canary_secrets_of_requests_appear_in_no_log_metric_event_or_trace": (
        "spo/observability.py",
    ),
    f"{_ORCHESTRATOR}/test_leadership.py::test_a_stopped_leader_that_wakes_up_ends_and_its_next_life_is_standby": (
        "services/orchestrator/commit.py",
    ),
    f"{_ORCHESTRATOR}/test_leadership.py::test_a_standby_says_who_leads_and_takes_over_from_one_that_is_killed": (
        "services/orchestrator/commit.py",
    ),
    f"{_ORCHESTRATOR}/replicas/test_autoscaling.py::"
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

# Files of 20 to 220 CPU s, each of which looks closely at one part; shorter ones and whole jobs pass through the same
# parts in every run.
FILES: dict[str, tuple[str, ...]] = {
    f"{_TRAINER}/test_baselines.py": ("spo/algorithm", "services/trainer/learner.py"),
    f"{_TRAINER}/test_engine.py": ("services/trainer/deepspeed_engine.py",),
    f"{_TRAINER}/test_process.py": ("services/trainer/loop.py", "services/trainer/lease.py"),
    f"{_TRAINER}/test_resume.py": ("services/trainer/checkpoints.py",),
    f"{_TRAINER}/test_jobs.py": ("services/trainer/controller.py", "services/trainer/loop.py"),
    f"{_TRAINER}/test_deepspeed_fields.py": ("services/trainer/deepspeed_fields.py",),
    f"{_TRAINER}/test_lora.py": ("services/trainer/weights.py",),
    f"{_TRAINER}/test_published_names.py": ("services/trainer/weights.py", "spo/model/folder_names.py"),
    f"{_TRAINER}/checkpoints/test_checkpoint_bucket.py": ("services/trainer/checkpoints.py",),
    f"{_TRAINER}/objectives/test_surrogates.py": ("spo/algorithm",),
    f"{_LIFECYCLE}/test_model_check.py": ("spo/model", "services/orchestrator/checks.py"),
    f"{_LIFECYCLE}/test_trainer_deaths.py": ("services/orchestrator/leases.py",),
    f"{_LIFECYCLE}/test_forks.py": ("services/orchestrator/forks.py",),
    f"{_LIFECYCLE}/test_forks_in_bucket.py": ("services/orchestrator/forks.py",),
    f"{_LIFECYCLE}/test_runner.py": ("services/orchestrator/steps.py",),
    f"{_LIFECYCLE}/test_upkeep.py": ("services/orchestrator/steps.py", "services/orchestrator/deletion.py"),
    f"{_LIFECYCLE}/test_plan_warnings.py": ("spo/spec/plan.py",),
    f"{_LIFECYCLE}/test_values_while_training.py": ("services/orchestrator/values.py",),
    f"{_ORCHESTRATOR}/http/test_api.py": ("services/orchestrator/http/app.py", "services/orchestrator/http/jobs.py"),
    f"{_ORCHESTRATOR}/http/pages/test_narrow_pages.py": ("services/orchestrator/http/pages",),
    f"{_ORCHESTRATOR}/http/pages/test_job_page_in_a_browser.py": ("services/orchestrator/http/pages",),
    f"{_ORCHESTRATOR}/serving/continual/test_rounds.py": ("services/orchestrator/continual.py",),
    f"{_ORCHESTRATOR}/serving/test_openai_package.py": ("services/orchestrator/serving.py",),
    f"{_ORCHESTRATOR}/serving/test_served_judges.py": ("services/orchestrator/serving.py",),
    f"{_ORCHESTRATOR}/experience/test_experience_api.py": ("services/orchestrator/stored_experience.py",),
    f"{_ORCHESTRATOR}/experience/test_availability.py": ("spo/experience",),
    f"{_ORCHESTRATOR}/datasets/test_datasets.py": ("services/orchestrator/datasets.py",),
    f"{_ORCHESTRATOR}/auth/test_access.py": ("services/orchestrator/auth.py",),
    "tests/integration/cli/test_judge_command.py": ("spo/cli/judge.py",),
    "tests/integration/cli/test_tasks_command.py": ("spo/cli/tasks.py",),
    f"{_JUDGE}/test_attacks_on_tests.py": ("services/sandbox_judge",),
    f"{_JUDGE}/test_libraries.py": ("services/sandbox_judge/jail",),
    f"{_JUDGE}/test_published_tasks.py": ("spo/tasks",),
    f"{_JUDGE}/test_faults.py": ("services/sandbox_judge",),
    f"{_JUDGE}/test_languages.py": ("services/sandbox_judge",),
    f"{_JUDGE}/test_whose_fault.py": ("services/sandbox_judge",),
    f"{_JUDGE}/test_scoring_functions.py": ("services/sandbox_judge/scoring.py",),
    "tests/integration/local/test_launcher_children.py": ("spo/local",),
    "tests/integration/inference/test_service.py": ("services/inference",),
    "tests/integration/inference/test_engine.py": ("services/inference",),
    "tests/integration/service/test_state_folder.py": ("spo/service/state.py",),
    "tests/integration/tutorials/test_tutorials.py": ("docs/tutorials",),
    "tests/integration/benchmarks/test_smoke.py": ("benchmarks",),
    "tests/unit/tasks/test_generators.py": ("spo/tasks",),
    "tests/unit/cli/test_documented_commands.py": ("docs", "spo/cli"),
    "tests/unit/repository/test_docs_site.py": ("docs", "mkdocs.yml"),
}
FILES_A_DAY = 8


def _chosen(table: dict[str, tuple[str, ...]], count: int) -> set[str]:
    return set(sampled(list(table), count, lambda name: (name.partition("::")[0], *table[name])))


CHOSEN = _chosen(PLATFORMS, PLATFORMS_A_DAY) | _chosen(LONG, LONG_A_DAY) | _chosen(FILES, FILES_A_DAY)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is neither of the day nor changed."""
    known = {*PLATFORMS, *LONG, *FILES}
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    for item in items:
        test = item.nodeid.partition("[")[0]
        names = [name for name in (test, test.partition("::")[0]) if name in known]
        # A test that has a row of its own goes by that, whatever becomes of its file.
        if names and names[0] not in CHOSEN and item.path.name not in named:
            item.add_marker(pytest.mark.skip(reason=f"not in the sample of {day()}"))
