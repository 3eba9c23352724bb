// How ranks wait for each other.
#ifndef RANKWISE_MEETING_H
#define RANKWISE_MEETING_H

#include "group.h"

// Arrives, once, and waits a bounded time for the others. DONE when all are there and at the same operation.
status_t meet(group_t *group);

// Remembers when the event loop was entered; every group_ function starts with it.
void enter(group_t *group);

// Whether the event loop has been held for as long as it may be.
bool held_too_long(const group_t *group);

#endif
