-- Every statement that runs, under its name. Both backends have the same names and parameters.

-- Meta, journal, probe

-- name: get_meta
SELECT value FROM meta WHERE key = :key;

-- name: set_meta
INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: definitions
SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name;

-- name: write_probe
INSERT INTO probe (n, at_us) VALUES (1, :now) ON CONFLICT (n) DO UPDATE SET at_us = excluded.at_us;

-- name: journal_head
SELECT position, chain FROM journal_unit ORDER BY position DESC LIMIT 1;

-- name: insert_journal_unit
INSERT INTO journal_unit (position, bytes, digest, chain) VALUES (:position, :bytes, :digest, :chain);

-- name: journal_units
SELECT position, bytes, digest, chain FROM journal_unit WHERE position > :after ORDER BY position LIMIT :limit;

-- Inserts, one a table

-- name: insert_account
INSERT INTO account (n, key, created_us)
VALUES (:n, :key, :created_us);

-- name: insert_model
INSERT INTO model (n, digest, identity, created_us)
VALUES (:n, :digest, :identity, :created_us);

-- name: insert_operation
INSERT INTO operation (n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us)
VALUES (:n, :account_n, :id, :kind, :payload_hash, :object_n, :state, :progress_seq, :result, :error, :executor_generation, :executor_progress_seq, :executor_exit_count, :executor_last_exit, :executor_error, :created_us, :updated_us);

-- name: insert_dependency
INSERT INTO dependency (operation_n, ordinal, account_n, depends_on, met)
VALUES (:operation_n, :ordinal, :account_n, :depends_on, :met);

-- name: insert_event
INSERT INTO event (operation_n, sequence, from_state, to_state, detail, executor_generation, occurred_us)
VALUES (:operation_n, :sequence, :from_state, :to_state, :detail, :executor_generation, :occurred_us);

-- name: insert_evidence
INSERT INTO evidence (operation_n, sequence, kind, generation, message, occurred_us)
VALUES (:operation_n, :sequence, :kind, :generation, :message, :occurred_us);

-- name: insert_payload
INSERT INTO payload (object_n, byte_count, digest, salt, bytes)
VALUES (:object_n, :byte_count, :digest, :salt, :bytes);

-- name: insert_attribute
INSERT INTO attribute (object_n, operation_n, byte_count, digest, salt, bytes)
VALUES (:object_n, :operation_n, :byte_count, :digest, :salt, :bytes);

-- name: insert_plan
INSERT INTO plan (n, object_n, model_n, profile, token_count, part_count, active, created_us)
VALUES (:n, :object_n, :model_n, :profile, :token_count, :part_count, :active, :created_us);

-- name: insert_part
INSERT INTO part (plan_n, part_index, token_start, token_end, byte_start, byte_end, digest, embedding_state, generation, updated_us)
VALUES (:plan_n, :part_index, :token_start, :token_end, :byte_start, :byte_end, :digest, :embedding_state, :generation, :updated_us);

-- name: insert_vector
INSERT INTO vector (plan_n, part_index, digest, bytes)
VALUES (:plan_n, :part_index, :digest, :bytes);

-- name: insert_memory
INSERT INTO memory (object_n, key, operation_n, plan_n, space_n, visibility, submitter_n, role, session_seq, occurred_us, expires_us, recorded_us, owner, agent, session, speaker)
VALUES (:object_n, :key, :operation_n, :plan_n, :space_n, :visibility, :submitter_n, :role, :session_seq, :occurred_us, :expires_us, :recorded_us, :owner, :agent, :session, :speaker);

-- name: insert_stream
INSERT INTO stream (object_n, key, account_n, operation_n, status, created_us, name, owner, agent)
VALUES (:object_n, :key, :account_n, :operation_n, :status, :created_us, :name, :owner, :agent);

-- name: insert_step
INSERT INTO step (object_n, key, operation_n, stream_n, ordinal, status, completed_by, created_us, completed_us, name, idempotency_key)
VALUES (:object_n, :key, :operation_n, :stream_n, :ordinal, :status, :completed_by, :created_us, :completed_us, :name, :idempotency_key);

-- All rows of a table in key order, for digests and check

-- name: all_account
SELECT n, key, created_us
FROM account ORDER BY n;

-- name: all_model
SELECT n, digest, identity, created_us
FROM model ORDER BY n;

-- name: all_operation
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation ORDER BY n;

-- name: all_dependency
SELECT operation_n, ordinal, account_n, depends_on, met
FROM dependency ORDER BY operation_n, ordinal;

-- name: all_event
SELECT operation_n, sequence, from_state, to_state, detail, executor_generation, occurred_us
FROM event ORDER BY operation_n, sequence;

-- name: all_evidence
SELECT operation_n, sequence, kind, generation, message, occurred_us
FROM evidence ORDER BY operation_n, sequence;

-- name: all_payload
SELECT object_n, byte_count, digest, salt, bytes
FROM payload ORDER BY object_n;

-- name: all_attribute
SELECT object_n, operation_n, byte_count, digest, salt, bytes
FROM attribute ORDER BY object_n;

-- name: all_plan
SELECT n, object_n, model_n, profile, token_count, part_count, active, created_us
FROM plan ORDER BY n;

-- name: all_part
SELECT plan_n, part_index, token_start, token_end, byte_start, byte_end, digest, embedding_state, generation, updated_us
FROM part ORDER BY plan_n, part_index;

-- name: all_vector
SELECT plan_n, part_index, digest, bytes
FROM vector ORDER BY plan_n, part_index;

-- name: all_memory
SELECT object_n, key, operation_n, plan_n, space_n, visibility, submitter_n, role, session_seq, occurred_us, expires_us, recorded_us, owner, agent, session, speaker
FROM memory ORDER BY object_n;

-- name: all_stream
SELECT object_n, key, account_n, operation_n, status, created_us, name, owner, agent
FROM stream ORDER BY object_n;

-- name: all_step
SELECT object_n, key, operation_n, stream_n, ordinal, status, completed_by, created_us, completed_us, name, idempotency_key
FROM step ORDER BY object_n;

-- Conditional updates: they change one row, or the unit does not fit

-- name: step_operations
UPDATE operation SET state = new.column4,
  progress_seq = new.column5,
  updated_us = new.column6,
  executor_generation = new.column7,
  executor_progress_seq = new.column8,
  executor_exit_count = new.column9,
  executor_last_exit = new.column10,
  executor_error = new.column11
FROM (
  VALUES (:n, :was_state, :was_progress_seq, :state, :progress_seq, :updated_us, :executor_generation, :executor_progress_seq, :executor_exit_count, :executor_last_exit, :executor_error)
) AS new
WHERE operation.n = new.column1 AND operation.state = new.column2 AND operation.progress_seq = new.column3;

-- name: end_operations
UPDATE operation SET state = new.column4,
  progress_seq = new.column5,
  updated_us = new.column6,
  result = new.column7,
  error = new.column8,
  executor_generation = new.column9,
  executor_progress_seq = new.column10,
  executor_exit_count = new.column11,
  executor_last_exit = new.column12,
  executor_error = new.column13
FROM (
  VALUES (:n, :was_state, :was_progress_seq, :state, :progress_seq, :updated_us, :result, :error, :executor_generation, :executor_progress_seq, :executor_exit_count, :executor_last_exit, :executor_error)
) AS new
WHERE operation.n = new.column1 AND operation.state = new.column2 AND operation.progress_seq = new.column3;

-- name: index_part
UPDATE part SET embedding_state = :embedding_state, generation = :generation, updated_us = :updated_us
WHERE plan_n = :plan_n AND part_index = :part_index AND embedding_state = :was_embedding_state;

-- name: complete_step
UPDATE step SET status = :status, completed_by = :completed_by, completed_us = :completed_us
WHERE object_n = :object_n AND completed_by IS :was_completed_by;

-- What has ended waits for nothing: its receipt stays as it is.
-- name: meet_dependencies
UPDATE dependency SET met = 1
WHERE account_n = :account_n AND depends_on = :depends_on AND met = 0
  AND (SELECT state FROM operation WHERE n = operation_n) NOT IN ('committed', 'rejected')
RETURNING operation_n;

-- name: touch_operation
UPDATE operation SET updated_us = max(updated_us, :at) WHERE n = :n;

-- Last integer keys

-- name: last_account
SELECT coalesce(max(n), 0) AS last FROM account;

-- name: last_model
SELECT coalesce(max(n), 0) AS last FROM model;

-- name: last_operation
SELECT coalesce(max(n), 0) AS last FROM operation;

-- name: last_attribute
SELECT coalesce(max(object_n), 0) AS last FROM attribute;

-- name: last_plan
SELECT coalesce(max(n), 0) AS last FROM plan;

-- Finders

-- name: find_account
SELECT n, key, created_us FROM account WHERE key = :key;

-- name: account
SELECT n, key, created_us FROM account WHERE n = :n;

-- name: operation
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation WHERE n = :n;

-- name: find_operation
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation WHERE account_n = :account_n AND id = :id;

-- name: stored_operations
SELECT account_n, id FROM operation WHERE (account_n, id) IN (VALUES (:account_n, :id));

-- name: operations
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation
WHERE account_n = :account_n AND n > :after AND (:state IS NULL OR state = :state) AND (:kind IS NULL OR kind = :kind)
ORDER BY n LIMIT :limit;

-- name: operations_unfinished
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation INDEXED BY operation_unfinished
WHERE account_n = :account_n AND n > :after AND state = :state AND (:kind IS NULL OR kind = :kind)
  AND state IN ('accepted', 'validated', 'blocked', 'planned', 'processing', 'indexed')
ORDER BY n LIMIT :limit;

-- name: operations_rejected
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation INDEXED BY operation_rejected
WHERE account_n = :account_n AND n > :after AND state = 'rejected' AND (:kind IS NULL OR kind = :kind)
ORDER BY n LIMIT :limit;

-- name: unfinished
SELECT n, account_n, id, kind, payload_hash, object_n, state, progress_seq, result, error, executor_generation, executor_progress_seq, executor_exit_count, executor_last_exit, executor_error, created_us, updated_us
FROM operation INDEXED BY operation_unfinished
WHERE state IN ('accepted', 'validated', 'blocked', 'planned', 'processing', 'indexed')
ORDER BY id;

-- name: unsettled_dependents
SELECT DISTINCT dependency.operation_n AS n
FROM dependency JOIN operation ON operation.n = dependency.operation_n
WHERE dependency.account_n = :account_n AND dependency.depends_on = :depends_on AND dependency.met = 0
  AND operation.state = 'blocked'
ORDER BY n;

-- name: has_dependents
SELECT EXISTS (SELECT 1 FROM dependency WHERE account_n = :account_n AND depends_on = :depends_on) AS found;

-- name: dependencies
SELECT operation_n, ordinal, account_n, depends_on, met FROM dependency WHERE operation_n = :operation_n ORDER BY ordinal;

-- name: events
SELECT operation_n, sequence, from_state, to_state, detail, executor_generation, occurred_us
FROM event WHERE operation_n = :operation_n AND sequence > :after ORDER BY sequence LIMIT :limit;

-- name: evidence
SELECT operation_n, sequence, kind, generation, message, occurred_us
FROM evidence WHERE operation_n = :operation_n AND sequence > :after ORDER BY sequence LIMIT :limit;

-- name: last_evidence
SELECT operation_n, sequence, kind, generation, message, occurred_us
FROM evidence WHERE operation_n = :operation_n ORDER BY sequence DESC LIMIT 1;

-- name: has_seen_end
SELECT EXISTS (
  SELECT 1 FROM evidence
  WHERE operation_n = :operation_n AND generation = :generation AND kind IN ('exit', 'stall', 'protocol')
) AS found;

-- name: last_generation
SELECT coalesce(max(generation), 0) AS last FROM evidence WHERE operation_n = 0;

-- name: payload
SELECT object_n, byte_count, digest, salt, bytes FROM payload WHERE object_n = :object_n;

-- name: attribute
SELECT object_n, operation_n, byte_count, digest, salt, bytes FROM attribute WHERE object_n = :object_n;

-- name: model
SELECT n, digest, identity, created_us FROM model WHERE n = :n;

-- name: find_model
SELECT n, digest, identity, created_us FROM model WHERE digest = :digest;

-- name: active_plan
SELECT n, object_n, model_n, profile, token_count, part_count, active, created_us
FROM plan WHERE object_n = :object_n AND active = 1;

-- name: parts
SELECT plan_n, part_index, token_start, token_end, byte_start, byte_end, digest, embedding_state, generation, updated_us
FROM part WHERE plan_n = :plan_n ORDER BY part_index;

-- name: missing_parts
SELECT plan_n, part_index, token_start, token_end, byte_start, byte_end, digest, embedding_state, generation, updated_us
FROM part WHERE plan_n = :plan_n AND part_index > :after AND embedding_state = 'planned' ORDER BY part_index LIMIT :limit;

-- name: part
SELECT plan_n, part_index, token_start, token_end, byte_start, byte_end, digest, embedding_state, generation, updated_us
FROM part WHERE plan_n = :plan_n AND part_index = :part_index;

-- name: vectors
SELECT plan_n, part_index, digest, bytes FROM vector WHERE plan_n = :plan_n ORDER BY part_index;

-- name: find_memory
SELECT object_n, key, operation_n, plan_n, space_n, visibility, submitter_n, role, session_seq, occurred_us, expires_us, recorded_us, owner, agent, session, speaker
FROM memory WHERE key = :key;

-- name: memory
SELECT object_n, key, operation_n, plan_n, space_n, visibility, submitter_n, role, session_seq, occurred_us, expires_us, recorded_us, owner, agent, session, speaker
FROM memory WHERE object_n = :object_n;

-- name: memories
SELECT object_n, key, operation_n, plan_n, space_n, visibility, submitter_n, role, session_seq, occurred_us, expires_us, recorded_us, owner, agent, session, speaker
FROM memory WHERE object_n > :after ORDER BY object_n LIMIT :limit;

-- name: streams
SELECT object_n, key, account_n, operation_n, status, created_us, name, owner, agent
FROM stream WHERE account_n = :account_n AND name = :name ORDER BY object_n;

-- name: stream
SELECT object_n, key, account_n, operation_n, status, created_us, name, owner, agent FROM stream WHERE object_n = :object_n;

-- name: steps
SELECT object_n, key, operation_n, stream_n, ordinal, status, completed_by, created_us, completed_us, name, idempotency_key
FROM step WHERE stream_n = :stream_n ORDER BY ordinal, object_n;

-- name: find_steps
SELECT step.object_n, step.key, step.operation_n, step.stream_n, step.ordinal, step.status, step.completed_by, step.created_us, step.completed_us, step.name, step.idempotency_key
FROM step JOIN stream ON stream.object_n = step.stream_n
WHERE step.idempotency_key = :idempotency_key AND stream.account_n = :account_n
ORDER BY step.object_n;
