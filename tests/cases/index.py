"""Where each case from the field is shown: its number → the tests that go red if its symptom comes back.

Each case is a symptom that users of other systems have reported, with the smallest input that shows it. The first tests
are the ones at the level where the case lives; those of `tests/cases` run the whole way from a client's request.
"""

from __future__ import annotations

CASES: dict[int, tuple[str, ...]] = {
    # Streamed text and stopping
    1: (
        "tests/cases/test_det.py::test_case_1_characters_of_several_tokens_come_whole",
        "tests/cases/test_det.py::test_case_1_an_incomplete_character_at_max_tokens_has_no_text",
        "tests/gateway/test_detokenizer.py::test_characters_in_byte_tokens_appear_whole",
        "tests/gateway/test_detokenizer.py::test_joined_deltas_are_the_full_decode",
    ),
    4: (
        "tests/cases/test_det.py::test_case_4_nothing_of_a_stop_string_is_sent_before_it_completes",
        "tests/gateway/test_stop_strings.py::test_nothing_is_shown_of_a_stop_before_it_is_complete",
    ),
    5: (
        "tests/cases/test_det.py::test_case_5_a_stop_across_tokens_is_cut_where_it_stands",
        "tests/gateway/test_stop_strings.py::test_equals_brute_force",
    ),
    7: (
        "tests/cases/test_det.py::test_case_7_what_was_held_back_comes_at_the_end_of_sequence",
        "tests/gateway/test_servicer.py::test_ends",
    ),
    9: ("tests/integration/test_bad_input.py::test_bad_input_names_its_field",),
    10: ("tests/cases/test_det.py::test_case_10_a_list_of_one_stop_of_one_token_stops",),
    12: (
        "tests/cases/test_smp.py::test_case_12_no_spelling_of_a_bad_word_is_let_through",
        "tests/cases/test_smp.py::test_case_12_a_vocabulary_with_holes_hides_no_form",
        "tests/cases/test_smp.py::test_case_12_a_bad_word_never_appears_where_it_is_likely",
        "tests/gateway/test_text.py::test_a_bad_word_is_banned_with_and_without_its_space",
        "tests/engine/test_processors.py::test_case_12_neither_form_of_a_bad_word_appears",
    ),
    # Lengths and limits
    13: (
        "tests/cases/test_det.py::test_case_13_no_stop_of_any_kind_beats_min_tokens",
        "tests/engine/test_processors.py::test_min_tokens_bans_stop_tokens_and_no_longer",
    ),
    15: (
        "tests/cases/test_drf.py::test_case_15_min_tokens_holds_under_speculation",
        "tests/worker/test_executor.py::test_processors_advance_position_by_position",
        "tests/engine/test_sampler_verification.py::test_case_15_verification_equals_plain_decoding_with_every_processor",
    ),
    16: ("tests/cases/test_gw.py::test_case_16_ignoring_the_end_of_sequence_takes_effect",),
    17: (
        "tests/cases/test_gw.py::test_case_17_every_option_reaches_the_sampler",
        "tests/cases/test_gw.py::test_case_17_no_option_is_missing_from_the_table",
        "tests/gateway/test_servicer.py::test_every_option_reaches_the_scheduler",
        "tests/gateway/test_servicer.py::test_no_public_option_is_missing_from_the_table",
    ),
    20: (
        "tests/scheduler/core/test_scheduler.py::"
        "test_case_20_a_prompt_over_the_context_is_refused_and_the_next_is_served",
        "tests/integration/test_bad_input.py::test_a_prompt_over_the_context_then_one_that_fits",
    ),
    22: ("tests/scheduler/core/test_scheduler.py::test_case_22_requests_without_max_tokens_run_together",),
    # Sampling
    23: ("tests/engine/test_sampler.py::test_case_23_tiny_temperatures_equal_greedy",),
    25: (
        "tests/engine/test_sampler.py::test_case_25_a_seeded_row_beside_an_unseeded_one",
        "tests/engine/test_sampler.py::test_a_row_is_the_same_in_any_company",
    ),
    27: (
        "tests/gateway/test_admission.py::test_every_way_to_switch_top_k_off_is_the_same",
        "tests/engine/test_sampler.py::test_case_27_top_k_off_in_three_ways",
    ),
    28: (
        "tests/cases/test_smp.py::test_case_28_penalties_are_the_same_cold_and_warm",
        "tests/scheduler/core/test_cases.py::test_case_28_a_warm_worker_is_told_as_much_of_the_prompt_as_a_cold_one",
    ),
    29: ("tests/engine/test_processors.py::test_case_29_what_each_penalty_counts",),
    30: (
        "tests/cases/test_smp.py::test_case_30_one_penalised_request_among_plain_ones",
        "tests/worker/test_executor_failures.py::test_not_a_number_fails_its_own_row_only",
        "tests/engine/test_sampler.py::test_case_30_and_31_a_bad_row_fails_alone",
    ),
    31: (
        "tests/integration/test_bad_input.py::test_bad_input_names_its_field",
        "tests/worker/test_executor_failures.py::test_a_bias_outside_the_vocabulary_fails_alone",
    ),
    # Log-probabilities
    33: (
        "tests/integration/test_operation.py::test_prompt_logprobs_do_not_depend_on_the_cache",
        "tests/scheduler/core/test_cases.py::test_case_33_prompt_logprobs_of_a_cached_prompt_equal_the_first_ones",
    ),
    34: (
        "tests/cases/test_sch.py::test_case_34_numbers_do_not_depend_on_who_was_cached_before",
        "tests/scheduler/core/test_cases.py::test_case_34_prompt_logprobs_do_not_depend_on_who_came_before",
    ),
    35: (
        "tests/cases/test_sch.py::test_case_35_chunks_and_preemption_change_no_prompt_logprob",
        "tests/scheduler/core/test_cases.py::test_case_35_chunks_and_preemption_leave_prompt_logprobs_whole_and_once",
        "tests/worker/test_executor.py::test_prompt_logprobs_do_not_depend_on_chunks",
    ),
    37: ("tests/engine/test_logprobs.py::test_the_floor_replaces_what_has_no_finite_logarithm",),
    # Prompts and templates
    38: ("tests/gateway/test_servicer_limits.py::test_bad_fields_are_refused_by_name_and_the_next_request_is_served",),
    39: (
        "tests/gateway/test_text.py::test_text_gets_the_tokenizers_bos_once",
        "tests/gateway/test_text.py::test_chat_has_exactly_one_bos_whoever_writes_it",
    ),
    41: (
        "tests/gateway/test_servicer_limits.py::test_a_templates_message_reaches_the_client",
        "tests/gateway/test_servicer_limits.py::test_bad_fields_are_refused_by_name_and_the_next_request_is_served",
        "tests/gateway/test_text.py::test_templates_are_sandboxed_and_their_failures_are_told",
    ),
    42: (
        "tests/cases/test_gw.py::test_case_42_and_78_a_prompt_of_5_mb_is_served_and_holds_nobody_up",
        "tests/gateway/test_process.py::test_short_texts_do_not_wait_for_long_ones",
    ),
    # Cancellation, deadlines, identity
    43: (
        "tests/cases/test_sch.py::test_case_43_no_step_after_a_disconnect_holds_the_row",
        "tests/gateway/test_servicer_limits.py::test_a_client_that_leaves_is_cancelled_everywhere",
        "tests/scheduler/core/test_scenarios.py::test_scenario",
    ),
    45: (
        "tests/cases/test_sch.py::test_case_45_a_cancellation_in_the_middle_of_a_step_touches_no_other_row",
        "tests/integration/test_operation.py::test_one_disconnect_changes_nothing_for_the_others",
    ),
    47: (
        "tests/scheduler/core/test_scheduler.py::"
        "test_case_47_blocks_of_a_cancelled_request_on_a_lost_worker_are_gone_with_it",
        "tests/scheduler/test_service.py::test_results_of_another_epoch_are_dropped",
    ),
    48: (
        "tests/integration/test_bad_input.py::test_a_live_id_cannot_be_used_again",
        "tests/scheduler/test_service.py::test_one_id_cannot_live_twice",
    ),
    50: (
        "tests/cases/test_sch.py::test_case_50_a_deadline_is_kept_while_the_job_before_hangs",
        "tests/scheduler/core/test_scheduler.py::"
        "test_case_50_a_deadline_is_kept_while_another_runs_and_nothing_is_prefilled",
    ),
    # Scheduler and KV
    52: (
        "tests/scheduler/core/test_scheduler.py::"
        "test_case_52_a_prompt_that_the_pool_never_holds_is_refused_and_the_next_is_served",
        "tests/scheduler/test_service.py::test_what_can_never_fit_is_refused_at_once",
    ),
    55: (
        "tests/scheduler/core/test_cases.py::test_case_55_a_preempted_output_is_the_unpreempted_one_each_token_once",
        "tests/integration/test_failures.py::test_tiny_pools_preempt_and_nobody_notices",
    ),
    56: (
        "tests/cases/test_sch.py::test_case_56_output_stays_output_after_a_preemption",
        "tests/worker/test_executor.py::test_a_resumed_sequence_continues_where_it_was",
    ),
    58: ("tests/scheduler/core/test_load.py::test_256_mixed_requests_leave_nothing_behind",),
    60: (
        "tests/cases/test_sch.py::test_case_60_the_prefix_cache_changes_no_token",
        "tests/engine/test_batch_invariance.py::test_prefix_hit",
    ),
    63: (
        "tests/scheduler/core/test_scheduler.py::test_case_63_the_queue_is_bounded_and_says_so_at_once",
        "tests/scheduler/test_service.py::test_a_full_queue_refuses_with_retry_info",
    ),
    # Speculative decoding
    64: (
        "tests/cases/test_drf.py::test_case_64_greedy_tokens_are_the_same_for_every_draft_length",
        "tests/worker/test_transformers.py::test_any_draft_gives_the_plain_tokens",
        "tests/integration/test_real_model.py::test_greedy_tokens_are_transformers_own",
    ),
    65: ("tests/engine/test_batch_invariance.py::test_prefill_chunks_and_verification",),
    67: (
        "tests/worker/test_verification.py::test_runs",
        "tests/cases/test_drf.py::test_case_67_and_68_a_stop_inside_an_accepted_run_ends_ids_logprobs_and_text",
    ),
    68: (
        "tests/cases/test_drf.py::test_case_67_and_68_a_stop_inside_an_accepted_run_ends_ids_logprobs_and_text",
        "tests/gateway/test_streams.py::test_text_after_a_stop_has_no_tokens_either",
    ),
    70: (
        "tests/cases/test_drf.py::test_case_70_padded_vocabularies_work_together",
        "tests/cases/test_drf.py::test_case_70_a_permuted_vocabulary_is_refused_at_start",
        "tests/engine/test_vocabulary.py::test_padded_in_either_direction",
    ),
    # Operation
    72: (
        "tests/cases/test_ops.py::test_case_72_without_a_worker_health_says_so_and_streams_end_unavailable",
        "tests/cases/test_ops.py::test_case_72_streams_wait_a_minute_unless_told_otherwise",
        "tests/integration/test_failures.py::test_streams_wait_for_a_new_worker_when_the_last_one_dies",
    ),
    74: (
        "tests/cases/test_ops.py::test_case_74_told_to_stop_at_the_third_token_it_delivers_all_fifty",
        "tests/gateway/test_process.py::test_a_process_serves_without_torch_and_drains_on_sigterm",
    ),
    75: (
        "tests/integration/test_operation.py::test_gauges_return_to_baseline_when_everything_is_aborted",
        "tests/gateway/test_servicer_limits.py::test_metrics_fall_back_to_zero",
    ),
    77: (
        "tests/cases/test_ops.py::test_case_77_requests_leave_nothing_behind",
        "tests/integration/test_operation.py::test_many_unique_prompts_leave_memory_and_maps_bounded",
    ),
    78: (
        "tests/cases/test_gw.py::test_case_42_and_78_a_prompt_of_5_mb_is_served_and_holds_nobody_up",
        "tests/gateway/test_process.py::test_big_messages_are_taken_or_refused_clearly",
    ),
    # Loading
    90: ("tests/engine/test_loading.py::test_a_missing_shard_is_named",),
    92: ("tests/engine/test_gguf_conversion.py::test_export_then_import_gives_the_same_weights",),
    93: (
        "tests/engine/test_gguf_conversion.py::test_tokenizer_ids",
        "tests/engine/test_gguf_conversion.py::test_an_unknown_pattern_is_warned_of_at_every_start",
    ),
}
