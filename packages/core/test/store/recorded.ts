/**
 * Conversations of torch 2.15's TCPStore client with its server, recorded between the two: what the client sends, and
 * what the server answers to it. Both of its servers (libuv and the legacy one) gave these bytes.
 */
export interface Exchange {
  readonly what: string
  readonly sent: string
  readonly answer: string
}

export const VALIDATE = '00cef7853c'
export const PING = '0d917c0000'
export const PONG = '917c0000'

export const RECORDED: readonly Exchange[] = [
  { what: 'validate and ping', sent: `${VALIDATE}${PING}`, answer: PONG },
  { what: "set('a', 'xyz')", sent: '0102000000000000002f61030000000000000078797a', answer: '' },
  { what: "wait(['a'])", sent: '06010000000000000002000000000000002f61', answer: '00' },
  { what: "get('a')", sent: '0302000000000000002f61', answer: '030000000000000078797a' },
  { what: "add('n', 5)", sent: '0402000000000000002f6e0500000000000000', answer: '0500000000000000' },
  { what: "add('n', -7)", sent: '0402000000000000002f6ef9ffffffffffffff', answer: 'feffffffffffffff' },
  { what: "get('n')", sent: '0302000000000000002f6e', answer: '02000000000000002d32' },
  {
    what: "compare_set('q', '', 'v')",
    sent: '0202000000000000002f710000000000000000010000000000000076',
    answer: '010000000000000076',
  },
  {
    what: "compare_set('q', 'bad', 'w')",
    sent: '0202000000000000002f710300000000000000626164010000000000000077',
    answer: '010000000000000076',
  },
  {
    what: "compare_set('zz', 'exp', 'w')",
    sent: '0203000000000000002f7a7a0300000000000000657870010000000000000077',
    answer: '0300000000000000657870',
  },
  {
    what: "check(['a', 'nope'])",
    sent: '05020000000000000002000000000000002f6105000000000000002f6e6f7065',
    answer: '01',
  },
  { what: "check(['a'])", sent: '05010000000000000002000000000000002f61', answer: '00' },
  { what: "wait(['a', 'n'])", sent: '06020000000000000002000000000000002f6102000000000000002f6e', answer: '00' },
  { what: "wait(['never'])", sent: '06010000000000000006000000000000002f6e65766572', answer: '' },
  { what: 'cancel of the wait', sent: '0c', answer: '01' },
  { what: 'num_keys()', sent: '07', answer: '0300000000000000' },
  { what: "delete_key('a')", sent: '0802000000000000002f61', answer: '0100000000000000' },
  { what: "delete_key('a') again", sent: '0802000000000000002f61', answer: '0000000000000000' },
  { what: "append('ap', '12')", sent: '0903000000000000002f617002000000000000003132', answer: '' },
  { what: "append('ap', '34')", sent: '0903000000000000002f617002000000000000003334', answer: '' },
  { what: "get('ap')", sent: '0303000000000000002f6170', answer: '040000000000000031323334' },
  {
    what: "multi_set(['m1', 'm2'], ['1', '2'])",
    sent: '0b020000000000000003000000000000002f6d3101000000000000003103000000000000002f6d32010000000000000032',
    answer: '',
  },
  {
    what: "multi_get(['m1', 'm2'])",
    sent: '0a020000000000000003000000000000002f6d3103000000000000002f6d32',
    answer: '010000000000000031010000000000000032',
  },
  { what: "queue_push('qq', 'el')", sent: '0e03000000000000002f71710200000000000000656c', answer: '' },
  { what: "queue_len('qq')", sent: '1003000000000000002f7171', answer: '0100000000000000' },
  { what: "wait(['qq'])", sent: '06010000000000000003000000000000002f7171', answer: '00' },
  { what: "queue_pop('qq')", sent: '0f03000000000000002f7171', answer: '01000000000000000200000000000000656c' },
  { what: "queue_pop('qq') again", sent: '0f03000000000000002f7171', answer: '0000000000000000' },
  { what: "barrier('bb', 1)", sent: '1203000000000000002f62620100000000000000', answer: '00' },
  { what: 'wait([])', sent: '060000000000000000', answer: '00' },
  { what: "get('missing')", sent: '0307000000000000006d697373696e67', answer: '0000000000000000' },
  { what: 'cancel without wait', sent: '0c', answer: '01' },
]
