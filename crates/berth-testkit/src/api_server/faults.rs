//! Fault injection for the test API server: match rules, effects, and repetition.
//!
//! Implements spec 10a §9.

use std::time::Duration;

use regex_lite::Regex;
use tokio_util::sync::CancellationToken;

use super::{clock::Chance, recorder::RecordedRequest, refusal::Refusal};

/// Simple failure of a request.
#[derive(Clone, Debug)]
pub enum SimpleFault {
    /// Delays the request; no failure.
    Late(Duration),
    /// Returns a status, with or without `Retry-After` in seconds, and an empty body.
    Status(u16, Option<u32>),
    /// Closes the connection.
    Cut,
    /// Never responds.
    Hang,
    /// Returns 200 with truncated JSON.
    Garbage,
}

/// Effect of a fault on a request.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Delays the request.
    Delay(Duration),
    /// Blocks the request until the fault is cleared.
    Hang,
    /// Refuses the request; `Retry-After` as in the refusal.
    Refuse(Refusal),
    /// Returns exactly this status, `Retry-After` in seconds, content type, and body.
    Answer(u16, Option<u32>, &'static str, String),
    /// Resets the connection (RST).
    Reset,
    /// Closes the connection (FIN).
    Close,
    /// Sends GOAWAY on the connection; the request is still answered.
    Goaway,
    /// Turns the connection into a black hole: neither read nor written any more.
    Blackhole,
    /// Cuts the response, and the connection, after so many bytes.
    CutBody(usize),
    /// Cuts the watch after so many events and so many bytes of the next one.
    Truncate(usize, usize),
    /// Cuts the watch before the bookmark that ends the initial events.
    CutBeforeMarker,
    /// Ends the watch cleanly after so many events.
    EndWatch(usize),
    /// Throttles the response to so many bytes per second.
    Slow(usize),
}

impl Effect {
    /// JSON refusal without `Retry-After`; an `etcdserver: leader changed` is 500 without a reason.
    pub fn status(code: u16, reason: &str, message: &str) -> Self {
        Self::Refuse(Refusal::new(code, reason, message))
    }

    /// 429 of API priority and fairness: plain text, `Retry-After` in seconds.
    pub fn too_many(seconds: u32) -> Self {
        Self::Refuse(Refusal::text(429, "Too many requests, please try again later.\n").after(seconds))
    }

    /// Whether the effect shapes the response, which has to exist first.
    fn shapes(&self) -> bool {
        matches!(
            self,
            Self::CutBody(_) | Self::Truncate(..) | Self::CutBeforeMarker | Self::EndWatch(_) | Self::Slow(_)
        )
    }
}

impl From<SimpleFault> for Effect {
    fn from(trouble: SimpleFault) -> Self {
        match trouble {
            SimpleFault::Late(by) => Self::Delay(by),
            SimpleFault::Status(code, after) => Self::Answer(code, after, "application/json", String::new()),
            SimpleFault::Cut => Self::Close,
            SimpleFault::Hang => Self::Hang,
            SimpleFault::Garbage => Self::Answer(200, None, "application/json", "{\"kind\":".to_owned()),
        }
    }
}

/// Fault: match criteria, effect, and repetition. An unset criterion matches everything; the default is one hit.
#[derive(Clone, Debug)]
pub struct Fault {
    effect: Effect,
    verb: Option<String>,
    resource: Option<String>,
    subresource: Option<String>,
    namespace: Option<String>,
    name: Option<Regex>,
    path: Option<String>,
    user: Option<String>,
    agent: Option<String>,
    connection: Option<u64>,
    skip: usize,
    times: usize,
    chance: f64,
    is_after: bool,
}

impl Fault {
    /// Creates a fault that matches every request and happens once.
    pub fn new(effect: Effect) -> Self {
        Self {
            is_after: effect.shapes(),
            effect,
            verb: None,
            resource: None,
            subresource: None,
            namespace: None,
            name: None,
            path: None,
            user: None,
            agent: None,
            connection: None,
            skip: 0,
            times: 1,
            chance: 1.0,
        }
    }

    /// Matches a verb and a resource, subresources included: `("patch", "pods")`; empty matches any.
    pub fn on(mut self, verb: &str, resource: &str) -> Self {
        self.verb = (!verb.is_empty()).then(|| verb.to_owned());
        self.resource = (!resource.is_empty()).then(|| resource.to_owned());
        self
    }

    /// Matches a subresource; empty is the object itself.
    pub fn subresource(mut self, subresource: &str) -> Self {
        self.subresource = Some(subresource.to_owned());
        self
    }

    /// Matches a namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Matches the whole object name by regular expression; for lists and watches, the name they select.
    pub fn name(mut self, pattern: &str) -> Self {
        self.name = Some(Regex::new(&format!("^(?:{pattern})$")).expect("invalid regular expression"));
        self
    }

    /// Matches path and query exactly.
    pub fn path(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Matches a user.
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// Matches a prefix of the user agent.
    pub fn agent(mut self, agent: &str) -> Self {
        self.agent = Some(agent.to_owned());
        self
    }

    /// Matches a connection, by its number.
    pub fn connection(mut self, id: u64) -> Self {
        self.connection = Some(id);
        self
    }

    /// Skips the first `count` matching requests.
    pub fn skip(mut self, count: usize) -> Self {
        self.skip = count;
        self
    }

    /// Limits the fault to `count` matching requests.
    pub fn times(mut self, count: usize) -> Self {
        self.times = count;
        self
    }

    /// Repeats the fault until it is cleared.
    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    /// Sets the probability of the fault, 0..=1.
    pub fn chance(mut self, share: f64) -> Self {
        self.chance = share;
        self
    }

    /// Injects the fault after the request has been committed, before the response.
    pub fn after_commit(mut self) -> Self {
        self.is_after = true;
        self
    }

    fn takes(&self, request: &RecordedRequest) -> bool {
        let same = |wanted: &Option<String>, is: &str| wanted.as_ref().is_none_or(|wanted| wanted == is);
        same(&self.verb, request.verb)
            && same(&self.resource, &request.resource)
            && same(&self.subresource, &request.subresource)
            && same(&self.namespace, &request.namespace)
            && same(&self.path, &request.path)
            && same(&self.user, &request.user)
            && self.name.as_ref().is_none_or(|name| name.is_match(&request.name))
            && self.agent.as_ref().is_none_or(|agent| request.agent().starts_with(agent.as_str()))
            && self.connection.is_none_or(|id| id == request.connection)
    }
}

/// Handle of an added fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultId(pub(super) u64);

struct Rule {
    id: FaultId,
    fault: Fault,
    hits: usize,
    cleared: CancellationToken,
}

/// All active faults.
pub(super) struct Faults {
    next: u64,
    rules: Vec<Rule>,
    chance: Chance,
}

impl Faults {
    pub fn new(seed: u64) -> Self {
        Self { next: 0, rules: Vec::new(), chance: Chance::new(seed) }
    }

    pub fn add(&mut self, fault: Fault) -> FaultId {
        self.next += 1;
        let id = FaultId(self.next);
        self.rules.push(Rule { id, fault, hits: 0, cleared: CancellationToken::new() });
        id
    }

    /// Removes a fault; requests that hang in it continue.
    pub fn clear(&mut self, id: FaultId) {
        self.rules.retain(|rule| {
            if rule.id == id {
                rule.cleared.cancel();
            }
            rule.id != id
        });
    }

    pub fn clear_all(&mut self) {
        self.rules.drain(..).for_each(|rule| rule.cleared.cancel());
    }

    /// Number of times that the fault happened.
    pub fn hits(&self, id: FaultId) -> usize {
        let rule = self.rules.iter().find(|rule| rule.id == id);
        rule.map_or(0, |rule| rule.hits.saturating_sub(rule.fault.skip))
    }

    /// Effect of the first fault that matches the request now; the token ends a hang.
    pub fn due(&mut self, request: &RecordedRequest, is_after: bool) -> Option<(Effect, CancellationToken)> {
        for rule in &mut self.rules {
            let fault = &rule.fault;
            let is_over = rule.hits >= fault.skip.saturating_add(fault.times);
            if is_over || fault.is_after != is_after || !fault.takes(request) {
                continue;
            }
            if fault.chance < 1.0 && (self.chance.next() >> 11) as f64 / (1_u64 << 53) as f64 >= fault.chance {
                continue;
            }
            rule.hits += 1;
            if rule.hits > fault.skip {
                return Some((fault.effect.clone(), rule.cleared.clone()));
            }
        }
        None
    }
}
