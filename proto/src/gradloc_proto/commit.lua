-- The owner's commit: everything or nothing, decided before the first write, because neither Lua
-- nor EXEC rolls back.
-- KEYS: lease, state, cursor, then one stream key per output.
-- ARGV: nonce, expected cursor, new cursor, state, then length_max and data per output.
local nonce, expected, new_cursor, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('TYPE', KEYS[1]).ok ~= 'string' then return 'lease-lost' end
if redis.call('GET', KEYS[1]) ~= nonce then return 'lease-lost' end
for i = 2, 3 do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'none' and kind ~= 'string' then return 'refused' end
end
for i = 4, #KEYS do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'none' and kind ~= 'stream' then return 'refused' end
  if kind == 'stream' then
    -- An absurd id (2^64-1) appended by a hostile writer would make XADD * fail half-way.
    local info = redis.call('XINFO', 'STREAM', KEYS[i])
    for j = 1, #info, 2 do
      if info[j] == 'last-generated-id' and string.len(string.match(info[j + 1], '^%d+')) > 15 then
        return 'refused'
      end
    end
  end
end
local current = redis.call('GET', KEYS[3])
if current == false then current = '' end
if current ~= expected then return 'cursor-moved' end
for i = 4, #KEYS do
  local at = 5 + 2 * (i - 4)
  redis.call('XADD', KEYS[i], 'MAXLEN', '~', ARGV[at], '*', 'm', ARGV[at + 1])
end
redis.call('SET', KEYS[2], state)
redis.call('SET', KEYS[3], new_cursor)
return 'done'
