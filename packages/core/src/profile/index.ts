export { type ChromeTrace, chromeTrace } from './chrome-trace.ts'
export { gatherProfile } from './gather-profile.ts'
export { type GraphProfile, profileSummary } from './profile-summary.ts'
export { type ProfileActivity, type ProfileCategory, type ProfileEvent, Profiler, profiled } from './profiler.ts'
