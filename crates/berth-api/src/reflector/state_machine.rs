//! State machine of a reflector: next list or watch request after each outcome. Pure.
//!
//! Implements spec 10 §3.2, §7 row "watches".
//!
//! ```text
//!        ┌──────── any failure, after a pause ────────┐
//!        ▼                                            │
//!   Streaming ── marker ──────────────► Watching ─────┤
//!        │ refused                        ▲   │ ended: again at once
//!        └────────► Listing ── listed ────┘◄──┘
//! ```
//!
//! Every request carries the last seen version, so that the cache never moves back in time; the version is dropped only
//! if the server does not know it. Times are durations since the start.

use std::time::Duration;

use super::backoff::{QuickRetry, WatchBackoff};
use crate::api::ApiError;

/// A watch that ended sooner than this, and without an event, counts as failed.
const SHORT: Duration = Duration::from_secs(1);

/// List or watch to perform next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReflectorRequest {
    /// Watch with initial events (`sendInitialEvents`), at least as new as that version (if any).
    Stream(String),
    /// List at least as new as that version: `"0"` for the server's watch cache, empty for the most recent.
    List(String),
    /// Watch of the changes after that version.
    Watch(String),
}

/// Why a list or watch begins, for metrics and logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestCause {
    /// First request.
    Start,
    /// The last watch ended regularly, or is retried from its last version.
    Resume,
    /// The server rejects a watch with initial events.
    Fallback,
    /// The server no longer has the version, or does not have it yet.
    Version,
    /// The stream ended before the initial events were complete.
    Cut,
    /// The watch ended at once.
    Short,
    /// The request failed.
    Failed,
}

impl RequestCause {
    /// Label of the relist metric; `None` if no objects are read again.
    pub fn relist(self) -> Option<&'static str> {
        match self {
            Self::Start | Self::Resume => None,
            Self::Fallback => Some("fallback"),
            Self::Version => Some("version"),
            Self::Cut => Some("cut"),
            Self::Short => Some("short_watch"),
            Self::Failed => Some("failed"),
        }
    }
}

/// Next request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Next {
    /// Delay before the request.
    pub pause: Duration,
    /// Request to perform.
    pub ask: ReflectorRequest,
    /// Cause, for the metric.
    pub why: RequestCause,
}

/// Class of a failure, which determines the next request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The server throttled the request.
    Throttled,
    /// The server is unreachable, or its response was lost.
    Unreachable,
    /// Authentication failed: a certificate has expired. A list would be refused as well.
    Unauthenticated,
    /// The server no longer has the version, or does not have it yet.
    Version,
    /// Not authorized, or not yet.
    Forbidden,
    /// Any other failure.
    Other,
}

/// Failure and the delay that the server requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestFailure {
    /// Class of the failure.
    pub fault: Fault,
    /// `Retry-After`.
    pub retry_after: Option<Duration>,
}

impl From<&ApiError> for RequestFailure {
    fn from(error: &ApiError) -> Self {
        let fault = match error {
            ApiError::Unreachable(_) | ApiError::Lost(_) | ApiError::Timeout(_) => Fault::Unreachable,
            ApiError::Malformed(_) => Fault::Other,
            ApiError::Refused(_) if error.is_throttled() => Fault::Throttled,
            ApiError::Refused(_) if error.is_gone() || error.is_version_too_large() => Fault::Version,
            ApiError::Refused(_) if error.is_forbidden() => Fault::Forbidden,
            ApiError::Refused(status) if status.code == 401 => Fault::Unauthenticated,
            ApiError::Refused(_) => Fault::Other,
        };
        Self { fault, retry_after: error.retry_after() }
    }
}

/// Time of an outcome, and the random number for the jitter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OutcomeTime {
    /// Time since the start.
    pub now: Duration,
    /// Uniform in 0..1.
    pub chance: f64,
}

/// Retry policy of refusals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusalRetry {
    /// Retries after the usual back-off.
    Ordinary,
    /// Retries soon at first, because a pod references the object (spec 10 §6.1).
    Quick,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Streaming,
    Listing { newest: bool },
    Watching,
}

/// State of a reflector.
#[derive(Clone, Debug)]
pub struct StateMachine {
    patience: RefusalRetry,
    phase: Phase,
    version: Option<String>,
    /// Consecutive streams that ended before the initial events were complete.
    cuts: u32,
    backoff: WatchBackoff,
    quick: QuickRetry,
}

impl StateMachine {
    /// Returns the initial state.
    pub fn new(patience: RefusalRetry) -> Self {
        Self {
            patience,
            phase: Phase::Streaming,
            version: None,
            cuts: 0,
            backoff: WatchBackoff::default(),
            quick: QuickRetry::default(),
        }
    }

    /// First request.
    pub fn first(&self) -> Next {
        Next { pause: Duration::ZERO, ask: ReflectorRequest::Stream(self.known()), why: RequestCause::Start }
    }

    /// Last seen version; empty if there is none.
    pub fn version(&self) -> &str {
        self.version.as_deref().unwrap_or_default()
    }

    /// Whether the set is complete, and changes are watched.
    pub fn is_watching(&self) -> bool {
        self.phase == Phase::Watching
    }

    /// Records an event or bookmark. An event proves that the watch works and resets the back-off; otherwise a pod that
    /// is bound after a bad minute would wait half a minute more (the kubelet resets it after two minutes).
    pub fn moved(&mut self, version: &str) {
        if self.is_watching() {
            self.backoff = WatchBackoff::default();
            self.reached(version);
        }
    }

    fn reached(&mut self, version: &str) {
        if !version.is_empty() {
            self.version = Some(version.to_owned());
        }
    }

    /// Resets the quick retries of refusals, because a caller needs an object now.
    pub fn nudged(&mut self) {
        self.quick = QuickRetry::default();
    }

    /// Records the bookmark that ends the initial events.
    pub fn streamed(&mut self, version: &str) {
        self.phase = Phase::Watching;
        self.cuts = 0;
        self.quick = QuickRetry::default();
        self.reached(version);
    }

    /// Records a complete list; returns the watch to start.
    pub fn listed(&mut self, version: &str) -> Next {
        self.streamed(version);
        self.at_once(ReflectorRequest::Watch(self.known()), RequestCause::Resume)
    }

    /// Next request after a request failed or an ERROR event ended the watch.
    pub fn failed(&mut self, failure: RequestFailure, at: OutcomeTime) -> Next {
        if failure.fault == Fault::Forbidden
            && self.patience == RefusalRetry::Quick
            && let Some(pause) = self.quick.pause(at.now)
        {
            self.phase = Phase::Streaming;
            return Next { pause, ask: ReflectorRequest::Stream(self.known()), why: RequestCause::Failed };
        }
        match (self.phase, failure.fault) {
            (Phase::Watching, Fault::Throttled | Fault::Unreachable | Fault::Unauthenticated) => {
                self.later(ReflectorRequest::Watch(self.known()), RequestCause::Resume, failure, at)
            }
            (Phase::Streaming, Fault::Version) if !self.version().is_empty() => {
                self.version = Some(String::new());
                self.at_once(ReflectorRequest::Stream(String::new()), RequestCause::Version)
            }
            (Phase::Streaming, Fault::Forbidden | Fault::Other) => self.list(RequestCause::Fallback),
            (Phase::Listing { newest: false }, Fault::Version) => {
                self.phase = Phase::Listing { newest: true };
                self.at_once(ReflectorRequest::List(String::new()), RequestCause::Version)
            }
            _ => self.again(RequestCause::Failed, failure, at),
        }
    }

    /// Next request after a watch ended; `silent`: no event with a version was received.
    pub fn ended(&mut self, lasted: Duration, silent: bool, at: OutcomeTime) -> Next {
        let none = RequestFailure { fault: Fault::Other, retry_after: None };
        match (self.phase, silent && lasted < SHORT) {
            (Phase::Watching, false) => self.at_once(ReflectorRequest::Watch(self.known()), RequestCause::Resume),
            (Phase::Watching, true) => self.again(RequestCause::Short, none, at),
            (_, true) => self.list(RequestCause::Fallback),
            (_, false) => {
                self.cuts = self.cuts.saturating_add(1);
                // A stream that is cut repeatedly is not retried in a busy loop.
                if self.cuts == 1 {
                    self.at_once(ReflectorRequest::Stream(self.known()), RequestCause::Cut)
                } else {
                    self.again(RequestCause::Cut, none, at)
                }
            }
        }
    }

    fn known(&self) -> String {
        self.version().to_owned()
    }

    fn list(&mut self, why: RequestCause) -> Next {
        self.phase = Phase::Listing { newest: false };
        // Without a version the server's watch cache is sufficient. After a version was dropped, only the most recent
        // state is certain not to be older.
        let version = self.version.clone().unwrap_or_else(|| "0".to_owned());
        self.at_once(ReflectorRequest::List(version), why)
    }

    fn again(&mut self, why: RequestCause, failure: RequestFailure, at: OutcomeTime) -> Next {
        self.phase = Phase::Streaming;
        self.later(ReflectorRequest::Stream(self.known()), why, failure, at)
    }

    fn at_once(&self, ask: ReflectorRequest, why: RequestCause) -> Next {
        Next { pause: Duration::ZERO, ask, why }
    }

    fn later(&mut self, ask: ReflectorRequest, why: RequestCause, failure: RequestFailure, at: OutcomeTime) -> Next {
        let pause = self.backoff.pause(at.now, at.chance);
        Next { pause: pause.max(failure.retry_after.unwrap_or_default()), ask, why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const AT: OutcomeTime = OutcomeTime { now: SECOND, chance: 0.0 };

    fn fails(fault: Fault) -> RequestFailure {
        RequestFailure { fault, retry_after: None }
    }

    fn watching(version: &str) -> StateMachine {
        let mut machine = StateMachine::new(RefusalRetry::Ordinary);
        machine.streamed(version);
        machine
    }

    fn stream(version: &str) -> ReflectorRequest {
        ReflectorRequest::Stream(version.to_owned())
    }

    fn list(version: &str) -> ReflectorRequest {
        ReflectorRequest::List(version.to_owned())
    }

    fn watch(version: &str) -> ReflectorRequest {
        ReflectorRequest::Watch(version.to_owned())
    }

    /// Next request, and its delay in milliseconds.
    fn shown(next: Next) -> (ReflectorRequest, u128) {
        (next.ask, next.pause.as_millis())
    }

    #[test]
    fn a_watch_that_does_not_begin() {
        for (name, fault, from_start, from_watching) in [
            ("429", Fault::Throttled, (stream(""), 800), (watch("5"), 800)),
            ("refused", Fault::Unreachable, (stream(""), 800), (watch("5"), 800)),
            ("401", Fault::Unauthenticated, (stream(""), 800), (watch("5"), 800)),
            // AC-10-8: the list starts from the server's watch cache.
            ("422", Fault::Other, (list("0"), 0), (stream("5"), 800)),
            ("403", Fault::Forbidden, (list("0"), 0), (stream("5"), 800)),
            // AC-10-11: resumes from its version, never back in time.
            ("410", Fault::Version, (stream(""), 800), (stream("5"), 800)),
        ] {
            let mut start = StateMachine::new(RefusalRetry::Ordinary);
            assert_eq!(start.first().ask, stream(""));
            assert_eq!(shown(start.failed(fails(fault), AT)), from_start, "{name}, at the start");
            assert_eq!(shown(watching("5").failed(fails(fault), AT)), from_watching, "{name}, watching");
        }
    }

    #[test]
    fn a_version_that_the_server_does_not_know_is_forgotten() {
        // AC-10-12
        let mut machine = watching("500");
        assert_eq!(shown(machine.failed(fails(Fault::Version), AT)), (stream("500"), 800));
        assert_eq!(shown(machine.failed(fails(Fault::Version), AT)), (stream(""), 0));
        assert_eq!(shown(machine.failed(fails(Fault::Version), AT)), (stream(""), 1600), "never in a loop");
        assert_eq!(shown(machine.failed(fails(Fault::Other), AT)), (list(""), 0), "only the newest is not older");
    }

    #[test]
    fn a_list_that_fails_is_asked_for_the_newest_once() {
        let mut machine = watching("7");
        machine.failed(fails(Fault::Other), AT);
        assert_eq!(shown(machine.failed(fails(Fault::Other), AT)), (list("7"), 0));
        assert_eq!(shown(machine.failed(fails(Fault::Version), AT)), (list(""), 0));
        assert_eq!(shown(machine.failed(fails(Fault::Version), AT)), (stream("7"), 1600));
        machine.failed(fails(Fault::Other), AT);
        assert_eq!(shown(machine.listed("9")), (watch("9"), 0));
    }

    #[test]
    fn the_server_is_left_alone_as_long_as_it_asks() {
        // AC-10-13
        let failure = RequestFailure { fault: Fault::Throttled, retry_after: Some(2 * SECOND) };
        assert_eq!(shown(watching("5").failed(failure, AT)), (watch("5"), 2000));
    }

    #[test]
    fn ends() {
        for (name, lasted, silent, expected) in [
            // AC-10-14
            ("after a while", 2 * SECOND, true, (watch("5"), 0)),
            ("short, with events", SECOND / 2, false, (watch("5"), 0)),
            // AC-10-15
            ("very short", SECOND / 2, true, (stream("5"), 800)),
        ] {
            assert_eq!(shown(watching("5").ended(lasted, silent, AT)), expected, "{name}");
        }
    }

    #[test]
    fn very_short_watches_are_asked_ever_less_often() {
        // AC-10-15
        let mut machine = watching("5");
        let mut pauses = Vec::new();
        let mut now = SECOND;
        for _ in 0..8 {
            let next = machine.ended(SECOND / 2, true, OutcomeTime { now, chance: 0.0 });
            assert_eq!((next.ask, next.why), (stream("5"), RequestCause::Short));
            now += next.pause;
            pauses.push(next.pause.as_millis());
            machine.streamed("5");
        }
        assert_eq!(pauses, [800, 1600, 3200, 6400, 12800, 25600, 30000, 30000]);
        machine.moved("6");
        let next = machine.ended(SECOND / 2, true, OutcomeTime { now, chance: 0.0 });
        assert_eq!(shown(next), (stream("6"), 800), "a watch that delivered an event resets the back-off");
    }

    #[test]
    fn a_stream_that_is_cut_before_everything_was_there() {
        // AC-10-9
        let mut machine = StateMachine::new(RefusalRetry::Ordinary);
        assert_eq!(shown(machine.ended(3 * SECOND, true, AT)), (stream(""), 0));
        assert_eq!(shown(machine.ended(SECOND / 2, false, AT)), (stream(""), 800), "not in a loop");
        assert_eq!(shown(machine.ended(SECOND / 2, true, AT)), (list("0"), 0));
        machine.moved("3");
        assert_eq!(machine.version(), "", "what was seen of a part is no version");
    }

    #[test]
    fn who_may_not_read_yet_asks_soon() {
        // AC-10-29
        let mut machine = StateMachine::new(RefusalRetry::Quick);
        for expected in [50, 100, 200] {
            assert_eq!(shown(machine.failed(fails(Fault::Forbidden), AT)), (stream(""), expected));
        }
        let late = OutcomeTime { now: SECOND * 12, chance: 0.0 };
        assert_eq!(shown(machine.failed(fails(Fault::Forbidden), late)), (list("0"), 0));
        assert_eq!(shown(machine.failed(fails(Fault::Forbidden), late)), (stream(""), 800));
        machine.nudged();
        assert_eq!(shown(machine.failed(fails(Fault::Forbidden), late)), (stream(""), 50));
    }

    #[test]
    fn errors_are_classified() {
        use crate::testing::refused;
        let of = |error: ApiError| RequestFailure::from(&error).fault;
        for (code, reason, fault) in [
            (429, "TooManyRequests", Fault::Throttled),
            (410, "Expired", Fault::Version),
            (410, "Gone", Fault::Version),
            (403, "Forbidden", Fault::Forbidden),
            (401, "Unauthorized", Fault::Unauthenticated),
            (422, "Invalid", Fault::Other),
            (504, "Timeout", Fault::Other),
        ] {
            assert_eq!(of(refused(code, reason, "x")), fault, "{code}");
        }
        assert_eq!(of(ApiError::Unreachable("x".into())), Fault::Unreachable);
        assert_eq!(of(ApiError::Timeout(SECOND)), Fault::Unreachable);
        assert_eq!(of(ApiError::Malformed("x".into())), Fault::Other);
    }
}
