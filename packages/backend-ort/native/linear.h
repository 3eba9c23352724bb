// The operator Linear of the domain 'rankwise': y = x @ w^T for w in bfloat16 [n, k] and x in float32 [..., k], which may
// be several values side by side: they come after w. RoundedLinear rounds y to bfloat16, and gives that as float32.
#pragma once
#include "runtime.h"

// The domain with both operators, on so many threads; the same for equal numbers. It stays to the end of the process.
char *linear_domain(int threads, OrtCustomOpDomain **domain);

// What multiplies on this processor.
const char *linear_instruction_set(void);
