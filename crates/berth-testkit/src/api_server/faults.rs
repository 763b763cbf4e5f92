//! What goes wrong, on demand: a rule says which requests, what happens to them, and how often. Spec 10a §9.

use std::time::Duration;

use regex_lite::Regex;
use tokio_util::sync::CancellationToken;

use super::{clock::Chance, recorder::Logged, refusal::Refusal};

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// Nothing, after a while.
    Late(Duration),
    /// A status, with `Retry-After` in seconds or without, and no body of use.
    Status(u16, Option<u32>),
    /// The connection is cut.
    Cut,
    /// No answer, ever.
    Hang,
    /// 200 and nothing that makes sense.
    Garbage,
}

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Effect {
    /// It waits.
    Delay(Duration),
    /// It waits until the fault is cleared.
    Hang,
    /// It is refused so; `Retry-After` as the refusal has it.
    Refuse(Refusal),
    /// Status, `Retry-After`, content type and body, word for word.
    Answer(u16, Option<u32>, &'static str, String),
    /// Its connection ends with RST.
    Reset,
    /// Its connection ends with FIN.
    Close,
    /// Its connection is told to go away; the request is answered.
    Goaway,
    /// Its connection is neither read nor written any more.
    Blackhole,
    /// The answer breaks off after so many bytes, and the connection with it.
    CutBody(usize),
    /// The watch breaks off after so many events and so many bytes of the next.
    Truncate(usize, usize),
    /// The watch breaks off before the bookmark that ends the initial events.
    CutBeforeMarker,
    /// The watch ends as watches end, after so many events.
    EndWatch(usize),
    /// So many bytes a second.
    Slow(usize),
}

impl Effect {
    /// A JSON refusal without `Retry-After`: `etcdserver: leader changed` is 500 and no reason.
    pub fn status(code: u16, reason: &str, message: &str) -> Self {
        Self::Refuse(Refusal::new(code, reason, message))
    }

    /// 429 of priority and fairness: plain text.
    pub fn too_many(seconds: u32) -> Self {
        Self::Refuse(Refusal::text(429, "Too many requests, please try again later.\n").after(seconds))
    }

    /// Whether it shapes the answer, which has to be there first.
    fn shapes(&self) -> bool {
        matches!(
            self,
            Self::CutBody(_) | Self::Truncate(..) | Self::CutBeforeMarker | Self::EndWatch(_) | Self::Slow(_)
        )
    }
}

impl From<Trouble> for Effect {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Late(by) => Self::Delay(by),
            Trouble::Status(code, after) => Self::Answer(code, after, "application/json", String::new()),
            Trouble::Cut => Self::Close,
            Trouble::Hang => Self::Hang,
            Trouble::Garbage => Self::Answer(200, None, "application/json", "{\"kind\":".to_owned()),
        }
    }
}

/// Which requests, what, how often. Every part that is not said matches everything; it happens once.
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
    /// A fault of every request, as often as there are requests.
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

    /// Requests with that verb for that resource, main or subresource: `("patch", "pods")`; empty is any.
    pub fn on(mut self, verb: &str, resource: &str) -> Self {
        self.verb = (!verb.is_empty()).then(|| verb.to_owned());
        self.resource = (!resource.is_empty()).then(|| resource.to_owned());
        self
    }

    /// That subresource; empty is the object itself.
    pub fn subresource(mut self, subresource: &str) -> Self {
        self.subresource = Some(subresource.to_owned());
        self
    }

    /// Only requests of this namespace.
    pub fn namespace(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Objects whose whole name matches; of lists and watches, the name they select.
    pub fn name(mut self, pattern: &str) -> Self {
        self.name = Some(Regex::new(&format!("^(?:{pattern})$")).expect("a pattern"));
        self
    }

    /// That path and query, exactly.
    pub fn path(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Only requests of this user.
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    /// User agents that begin so.
    pub fn agent(mut self, agent: &str) -> Self {
        self.agent = Some(agent.to_owned());
        self
    }

    /// Only requests of this connection, by its number.
    pub fn connection(mut self, id: u64) -> Self {
        self.connection = Some(id);
        self
    }

    /// Not to the first so many.
    pub fn skip(mut self, count: usize) -> Self {
        self.skip = count;
        self
    }

    /// Only the first `count` requests that match.
    pub fn times(mut self, count: usize) -> Self {
        self.times = count;
        self
    }

    /// Until it is cleared.
    pub fn always(self) -> Self {
        self.times(usize::MAX)
    }

    /// In so many of all cases, 0..=1.
    pub fn chance(mut self, share: f64) -> Self {
        self.chance = share;
        self
    }

    /// Once the request has had its effect, before it is answered.
    pub fn after_commit(mut self) -> Self {
        self.is_after = true;
        self
    }

    fn takes(&self, request: &Logged) -> bool {
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

/// A fault that was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultId(pub(super) u64);

struct Rule {
    id: FaultId,
    fault: Fault,
    hits: usize,
    cleared: CancellationToken,
}

/// All of them.
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

    /// It does not happen any more, and who hangs in it goes on.
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

    /// How often it happened.
    pub fn hits(&self, id: FaultId) -> usize {
        let rule = self.rules.iter().find(|rule| rule.id == id);
        rule.map_or(0, |rule| rule.hits.saturating_sub(rule.fault.skip))
    }

    /// What happens to that request now; the token ends a hang.
    pub fn due(&mut self, request: &Logged, is_after: bool) -> Option<(Effect, CancellationToken)> {
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
