-- The whole schema; equal to the sum of the migrations (tests/contract/test_schema.py).
-- Integer keys inside, text IDs once in one unique index, STRICT everywhere (ADR 0004, ADR 0007).
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE probe (
  n INTEGER PRIMARY KEY CHECK (n = 1),
  at_us INTEGER NOT NULL
) STRICT;

CREATE TABLE journal_unit (
  position INTEGER PRIMARY KEY,
  bytes BLOB NOT NULL,
  digest BLOB NOT NULL CHECK (length(digest) = 32),
  chain BLOB NOT NULL CHECK (length(chain) = 32)
) STRICT;

CREATE TABLE account (
  n INTEGER PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  created_us INTEGER NOT NULL
) STRICT;

CREATE TABLE model (
  n INTEGER PRIMARY KEY,
  digest TEXT NOT NULL UNIQUE,
  identity TEXT NOT NULL,
  created_us INTEGER NOT NULL
) STRICT;

CREATE TABLE operation (
  n INTEGER PRIMARY KEY,
  account_n INTEGER NOT NULL REFERENCES account (n),
  id TEXT NOT NULL CHECK (id <> ''),
  kind TEXT NOT NULL CHECK (kind IN ('add_memory', 'create_task_stream', 'add_task_step', 'complete_step')),
  payload_hash TEXT NOT NULL CHECK (length(payload_hash) = 64),
  object_n INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (
    state IN ('accepted', 'validated', 'blocked', 'planned', 'processing', 'indexed', 'committed', 'rejected')
  ),
  progress_seq INTEGER NOT NULL CHECK (progress_seq > 0),
  result TEXT,
  error TEXT,
  executor_generation INTEGER NOT NULL,
  executor_progress_seq INTEGER NOT NULL,
  executor_exit_count INTEGER NOT NULL,
  executor_last_exit TEXT,
  executor_error TEXT,
  created_us INTEGER NOT NULL,
  updated_us INTEGER NOT NULL,
  UNIQUE (account_n, id)
) STRICT;

CREATE INDEX operation_unfinished ON operation (account_n, state, n)
WHERE state IN ('accepted', 'validated', 'blocked', 'planned', 'processing', 'indexed');

CREATE INDEX operation_rejected ON operation (account_n, n) WHERE state = 'rejected';

CREATE TABLE dependency (
  operation_n INTEGER NOT NULL REFERENCES operation (n),
  ordinal INTEGER NOT NULL,
  account_n INTEGER NOT NULL,
  depends_on TEXT NOT NULL CHECK (depends_on <> ''),
  met INTEGER NOT NULL CHECK (met IN (0, 1)),
  PRIMARY KEY (operation_n, ordinal)
) STRICT, WITHOUT ROWID;

CREATE INDEX dependency_reverse ON dependency (account_n, depends_on, met);

CREATE TABLE event (
  operation_n INTEGER NOT NULL REFERENCES operation (n),
  sequence INTEGER NOT NULL CHECK (sequence > 0),
  from_state TEXT,
  to_state TEXT NOT NULL,
  detail TEXT,
  executor_generation INTEGER NOT NULL,
  occurred_us INTEGER NOT NULL,
  PRIMARY KEY (operation_n, sequence)
) STRICT, WITHOUT ROWID;

-- Operation 0 is the store itself: generations reserved, children ready and ended.
CREATE TABLE evidence (
  operation_n INTEGER NOT NULL,
  sequence INTEGER NOT NULL CHECK (sequence > 0),
  kind TEXT NOT NULL,
  generation INTEGER NOT NULL,
  message TEXT,
  occurred_us INTEGER NOT NULL,
  PRIMARY KEY (operation_n, sequence)
) STRICT, WITHOUT ROWID;

CREATE TABLE attribute (
  object_n INTEGER PRIMARY KEY,
  operation_n INTEGER NOT NULL REFERENCES operation (n),
  byte_count INTEGER NOT NULL,
  digest TEXT NOT NULL CHECK (length(digest) = 64),
  salt BLOB,
  bytes BLOB
) STRICT;

CREATE TABLE payload (
  object_n INTEGER PRIMARY KEY REFERENCES attribute (object_n),
  byte_count INTEGER NOT NULL,
  digest TEXT NOT NULL CHECK (length(digest) = 64),
  salt BLOB,
  bytes BLOB
) STRICT;

CREATE TABLE plan (
  n INTEGER PRIMARY KEY,
  object_n INTEGER NOT NULL REFERENCES payload (object_n),
  model_n INTEGER NOT NULL REFERENCES model (n),
  profile TEXT NOT NULL,
  token_count INTEGER NOT NULL,
  part_count INTEGER NOT NULL CHECK (part_count > 0),
  active INTEGER NOT NULL CHECK (active IN (0, 1)),
  created_us INTEGER NOT NULL,
  UNIQUE (object_n, model_n, profile)
) STRICT;

CREATE UNIQUE INDEX plan_active ON plan (object_n) WHERE active = 1;

CREATE TABLE part (
  plan_n INTEGER NOT NULL REFERENCES plan (n),
  part_index INTEGER NOT NULL CHECK (part_index >= 0),
  token_start INTEGER NOT NULL,
  token_end INTEGER NOT NULL CHECK (token_end >= token_start),
  byte_start INTEGER NOT NULL,
  byte_end INTEGER NOT NULL CHECK (byte_end > byte_start),
  digest TEXT NOT NULL CHECK (length(digest) = 64),
  embedding_state TEXT NOT NULL CHECK (embedding_state IN ('planned', 'indexed')),
  generation INTEGER NOT NULL,
  updated_us INTEGER NOT NULL,
  PRIMARY KEY (plan_n, part_index)
) STRICT, WITHOUT ROWID;

CREATE TABLE vector (
  plan_n INTEGER NOT NULL,
  part_index INTEGER NOT NULL,
  digest TEXT NOT NULL CHECK (length(digest) = 64),
  bytes BLOB,
  PRIMARY KEY (plan_n, part_index),
  FOREIGN KEY (plan_n, part_index) REFERENCES part (plan_n, part_index)
) STRICT;

CREATE TABLE memory (
  object_n INTEGER PRIMARY KEY REFERENCES payload (object_n),
  key TEXT NOT NULL UNIQUE,
  operation_n INTEGER NOT NULL UNIQUE REFERENCES operation (n),
  plan_n INTEGER NOT NULL REFERENCES plan (n),
  space_n INTEGER,
  visibility TEXT NOT NULL CHECK (visibility IN ('private', 'space', 'instance')),
  submitter_n INTEGER,
  role TEXT CHECK (role IN ('user', 'assistant', 'system', 'tool')),
  session_seq INTEGER,
  occurred_us INTEGER,
  expires_us INTEGER,
  recorded_us INTEGER NOT NULL,
  owner TEXT,
  agent TEXT,
  session TEXT,
  speaker TEXT
) STRICT;

CREATE TABLE stream (
  object_n INTEGER PRIMARY KEY REFERENCES attribute (object_n),
  key TEXT NOT NULL UNIQUE,
  account_n INTEGER NOT NULL REFERENCES account (n),
  operation_n INTEGER NOT NULL UNIQUE REFERENCES operation (n),
  status TEXT NOT NULL CHECK (status IN ('active')),
  created_us INTEGER NOT NULL,
  name TEXT,
  owner TEXT,
  agent TEXT
) STRICT;

CREATE INDEX stream_name ON stream (account_n, name);

CREATE TABLE step (
  object_n INTEGER PRIMARY KEY REFERENCES attribute (object_n),
  key TEXT NOT NULL UNIQUE,
  operation_n INTEGER NOT NULL UNIQUE REFERENCES operation (n),
  stream_n INTEGER NOT NULL REFERENCES stream (object_n),
  ordinal INTEGER NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('pending', 'completed')),
  completed_by INTEGER REFERENCES attribute (object_n),
  created_us INTEGER NOT NULL,
  completed_us INTEGER,
  name TEXT,
  idempotency_key TEXT,
  UNIQUE (stream_n, idempotency_key)
) STRICT;

CREATE INDEX step_idempotency_key ON step (idempotency_key);
