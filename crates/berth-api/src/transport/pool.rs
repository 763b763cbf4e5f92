//! Connection pool of one traffic type: dials, assigns slots, drains, and closes connections.
//!
//! ```text
//!  take ──► queue ──► task ──► slot ──► request ──► release
//!                      │ ▲
//!                 dial ▼ │ connected, failed
//! ```
//!
//! While the server is unreachable, only the task dials, with exponential back-off; requests wait or fail at once with
//! the error of the last attempt. Pools share results: a success in one pool makes all dial at once, and a failure of
//! the heartbeat pool spares the others an attempt. A lost connection triggers pings on all others.
//!
//! Implements spec 10 §8.2, §8.3.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    connection::{ApiConnection, Http1Lease},
    connection_choice::{Choice, Load, TrafficType, choose, pause},
    dial_backoff::DialBackoff,
    dialer::Dialer,
};
use berth_metrics::{ApiClientMetrics, LastContact};

/// Time without requests after which a connection is closed; the heartbeat's stays open.
const IDLE: Duration = Duration::from_secs(90);
/// Time that requests in flight on a draining connection have to finish.
const DRAIN: Duration = Duration::from_secs(10);
/// Time over which lost watches are spread when they reconnect.
pub const SPREAD: Duration = Duration::from_secs(2);
/// Range of the maximum age of a watch connection: rebalances watches to servers that started later.
const AGE: [Duration; 2] = [Duration::from_secs(8 * 3600), Duration::from_secs(12 * 3600)];
/// Time that requests in flight have after a server's GOAWAY; the server usually closes sooner.
const FAREWELL: Duration = Duration::from_secs(3600);
/// Timer duration when nothing is due.
const LONG: Duration = Duration::from_secs(3600);
/// Age from which on a dial is abandoned when another pool connects.
const STALE: Duration = Duration::from_secs(1);
/// Maximum number of waiting requests.
const ASKS: usize = 4096;

/// Constraints on the connection that carries a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotRequirements {
    /// ID of a connection to avoid.
    pub avoid: Option<u64>,
    /// Exempt from the spreading after a reconnect, because pods depend on it.
    pub is_first: bool,
}

/// No slot is available; the text is the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable(pub String);

struct SlotRequest {
    want: SlotRequirements,
    reply: oneshot::Sender<Result<PoolSlot, Unavailable>>,
}

enum PoolEvent {
    /// A slot was released.
    Back { id: u64, is_fit: bool },
    /// Drain all connections.
    Renew,
    /// A connection accepts no more requests: wakes the task.
    Over,
}

/// Slot on a connection; released when dropped.
pub struct PoolSlot {
    connection: Arc<ApiConnection>,
    /// Occupies an HTTP/1.1 connection.
    pub turn: Http1Lease,
    /// Earliest time of use.
    pub not_before: Instant,
    events: mpsc::UnboundedSender<PoolEvent>,
    is_read: bool,
    is_suspect: bool,
}

impl PoolSlot {
    /// Connection of the slot.
    pub fn connection(&self) -> &Arc<ApiConnection> {
        &self.connection
    }

    /// Marks the response as read completely.
    pub fn was_read(&mut self) {
        self.connection.give_back(&mut self.turn);
        (self.is_read, self.is_suspect) = (true, false);
    }

    /// Sets whether a drop before the response was read means that the connection is dead.
    pub fn suspect(&mut self, is_suspect: bool) {
        self.is_suspect = is_suspect;
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        // On HTTP/1.1 an unread response blocks the next request.
        let is_stuck = !self.is_read && !self.connection.is_http2();
        let event = PoolEvent::Back { id: self.connection.id, is_fit: !is_stuck && !self.is_suspect };
        let _ = self.events.send(event); // the pool is gone, and its connections with it
    }
}

/// Handle of a pool.
pub struct Pool {
    /// Traffic type.
    pub kind: TrafficType,
    /// When the server last responded.
    pub contact: LastContact,
    asks: mpsc::Sender<SlotRequest>,
    events: mpsc::UnboundedSender<PoolEvent>,
    trouble: Arc<Mutex<Option<String>>>,
}

impl Pool {
    /// Drains all connections, so that new requests use new ones.
    pub fn renew(&self) {
        let _ = self.events.send(PoolEvent::Renew); // the pool is gone
    }

    /// Waits for a slot.
    ///
    /// # Errors
    /// No connection can be established. Watches fail only at `latest`, other requests as soon as a dial fails.
    pub async fn take(&self, want: SlotRequirements, latest: Instant) -> Result<PoolSlot, Unavailable> {
        let (reply, answer) = oneshot::channel();
        let taking = async {
            let gone = || Unavailable("the client is closed".to_owned());
            self.asks.send(SlotRequest { want, reply }).await.map_err(|_| gone())?;
            answer.await.map_err(|_| gone())?
        };
        tokio::time::timeout_at(latest, taking).await.unwrap_or_else(|_| {
            let trouble =
                self.trouble().unwrap_or_else(|| "timed out waiting for a connection to the API server".to_owned());
            Err(Unavailable(trouble))
        })
    }

    /// Error of the last dial; `None` while the server is reachable.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// State shared by all pools of a transport.
#[derive(Clone)]
pub struct SharedPoolState {
    /// Dialer of the server.
    pub dialer: Arc<Dialer>,
    /// Metrics of connections.
    pub metrics: ApiClientMetrics,
    /// Changes when the identity or the authorities change.
    pub epoch: watch::Receiver<u64>,
    /// Changes when a pool connects.
    pub reached: watch::Sender<u64>,
    /// Pool that last failed to connect.
    pub missed: watch::Sender<Option<TrafficType>>,
}

/// Connection and its load.
struct PooledConnection {
    connection: Arc<ApiConnection>,
    streams: usize,
    idle: Instant,
    retires: Instant,
    /// Set while it is draining: closed at this time at the latest.
    ends: Option<Instant>,
}

/// Pending connection attempt; a pool has at most one.
struct DialInProgress {
    begun: Instant,
    outcome: BoxFuture<'static, Result<Arc<ApiConnection>, String>>,
}

/// Task that owns the connections.
pub struct PoolTask {
    kind: TrafficType,
    shared: SharedPoolState,
    asks: mpsc::Receiver<SlotRequest>,
    events: mpsc::UnboundedReceiver<PoolEvent>,
    sender: mpsc::UnboundedSender<PoolEvent>,
    connections: Vec<PooledConnection>,
    waiting: Vec<SlotRequest>,
    dialling: Option<DialInProgress>,
    gate: DialBackoff,
    trouble: Arc<Mutex<Option<String>>>,
}

/// Returns a pool, and the task that must run for it.
pub fn pool(kind: TrafficType, shared: SharedPoolState) -> (Pool, PoolTask) {
    let (asks, inbox) = mpsc::channel(ASKS);
    let (sender, events) = mpsc::unbounded_channel(); // one event per slot, and slots are bounded
    let trouble: Arc<Mutex<Option<String>>> = Arc::default();
    let task = PoolTask {
        kind,
        shared,
        asks: inbox,
        events,
        sender: sender.clone(),
        connections: Vec::new(),
        waiting: Vec::new(),
        dialling: None,
        gate: DialBackoff::default(),
        trouble: trouble.clone(),
    };
    (Pool { kind, contact: LastContact::default(), asks, events: sender, trouble }, task)
}

impl PoolTask {
    /// Runs until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let (mut reached, mut missed) = (self.shared.reached.subscribe(), self.shared.missed.subscribe());
        let mut triggers = self.shared.dialer.pinger.triggers();
        let mut epoch = self.shared.epoch.clone();
        loop {
            self.close_expired(Instant::now());
            self.serve(Instant::now());
            let streams = self.connections.iter().map(|pooled| pooled.streams).sum();
            self.shared.metrics.set_connections(self.kind.label(), self.connections.len(), streams);
            let wake = self.wake(Instant::now());
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Ok(()) = epoch.changed() => self.renew(Instant::now()),
                made = dialled(&mut self.dialling) => self.dialled(made, Instant::now()),
                Some(event) = self.events.recv() => self.happened(event, Instant::now()),
                ask = self.asks.recv(), if self.waiting.len() < ASKS => match ask {
                    Some(ask) => self.waiting.push(ask),
                    None => break, // all handles are gone
                },
                Ok(()) = reached.changed() => self.reached(Instant::now()),
                Ok(()) = missed.changed() => {
                    let who = *missed.borrow_and_update();
                    self.missed(who, Instant::now());
                }
                Ok(()) = triggers.changed() => self.close_unpingable(),
                () = sleep_until(wake) => {}
            }
        }
        for pooled in &self.connections {
            pooled.connection.closed.cancel();
        }
        self.shared.metrics.set_connections(self.kind.label(), 0, 0);
    }

    /// Time of the next timeout.
    fn wake(&self, now: Instant) -> Instant {
        let ends = |pooled: &PooledConnection| match pooled.ends {
            Some(ends) => ends,
            None if pooled.streams == 0 && self.kind != TrafficType::Beat => (pooled.idle + IDLE).min(pooled.retires),
            None => pooled.retires,
        };
        let opens = self.gate.opens.filter(|_| self.gate.is_wanted || !self.waiting.is_empty());
        self.connections.iter().map(ends).chain(opens).min().unwrap_or(now + LONG)
    }

    /// Drains and closes connections that are lost, idle, or too old.
    fn close_expired(&mut self, now: Instant) {
        let (kind, mut lost, mut needs_ping) = (self.kind, 0, false);
        for pooled in &mut self.connections {
            let is_over = pooled.connection.is_over();
            if is_over && pooled.ends.is_none() {
                // The server may still finish the requests in flight.
                pooled.ends = Some(now + FAREWELL);
                lost += pooled.streams;
                needs_ping = true;
            }
            if now >= pooled.retires && pooled.ends.is_none() {
                drain(pooled, now);
            }
            let is_idle = pooled.streams == 0 && kind != TrafficType::Beat && now.duration_since(pooled.idle) >= IDLE;
            if is_idle || pooled.ends.is_some_and(|ends| pooled.streams == 0 || now >= ends) {
                pooled.connection.closed.cancel();
            }
        }
        self.connections.retain(|pooled| !pooled.connection.closed.is_cancelled());
        if needs_ping {
            self.shared.dialer.pinger.trigger();
        }
        if lost > 0 {
            debug!(pool = kind.label(), requests = lost, "API server closed connection");
            (self.gate.is_recovering, self.gate.spread) = (true, Some(now + SPREAD));
        }
    }

    /// Assigns slots to waiting requests, and starts a dial if there are too few.
    fn serve(&mut self, now: Instant) {
        let mut is_short = false;
        for ask in std::mem::take(&mut self.waiting) {
            if ask.reply.is_closed() {
                continue;
            }
            match choose(self.kind, &self.loads(), ask.want.avoid) {
                Choice::On(id) => self.grant(ask, id, now),
                Choice::Wait => self.waiting.push(ask),
                Choice::Dial => {
                    is_short = true;
                    self.gate.is_wanted = true;
                    self.want(ask);
                }
            }
        }
        self.gate.opens = self.gate.opens.filter(|opens| now < *opens);
        if (is_short || self.gate.is_wanted) && self.gate.opens.is_none() && self.dialling.is_none() {
            self.gate.is_wanted = false;
            let (dialer, epoch) = (self.shared.dialer.clone(), *self.shared.epoch.borrow());
            let outcome: BoxFuture<'static, _> = match self.kind {
                TrafficType::Beat => Box::pin(async move { dialer.dial_twice(epoch).await }),
                TrafficType::Unary | TrafficType::Watch => Box::pin(async move { dialer.dial(epoch).await }),
            };
            self.dialling = Some(DialInProgress { begun: now, outcome });
        }
    }

    /// Queues a request that needs a new connection. Unary requests fail at once with the error of the last dial: their
    /// callers have their own retry policy.
    fn want(&mut self, ask: SlotRequest) {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match trouble {
            Some(trouble) if self.kind == TrafficType::Unary && self.gate.opens.is_some() => {
                let _ = ask.reply.send(Err(Unavailable(trouble))); // the caller is gone
            }
            _ => self.waiting.push(ask),
        }
    }

    fn loads(&self) -> Vec<Load> {
        let usable = self.connections.iter().filter(|pooled| pooled.ends.is_none() && !pooled.connection.is_over());
        let load = |pooled: &PooledConnection| Load {
            id: pooled.connection.id,
            streams: pooled.streams,
            limit: pooled.connection.limit(),
            is_http2: pooled.connection.is_http2(),
        };
        usable.map(load).collect()
    }

    fn grant(&mut self, ask: SlotRequest, id: u64, now: Instant) {
        let Some(pooled) = self.connections.iter_mut().find(|pooled| pooled.connection.id == id) else { return };
        let spread = self.gate.spread.filter(|end| *end > now && !ask.want.is_first && self.kind == TrafficType::Watch);
        let not_before = spread.map_or(now, |end| now + (end - now).mul_f64(rand::random()));
        pooled.streams += 1;
        let slot = PoolSlot {
            connection: pooled.connection.clone(),
            turn: Http1Lease::default(),
            not_before,
            events: self.sender.clone(),
            is_read: false,
            is_suspect: false,
        };
        let _ = ask.reply.send(Ok(slot)); // if the caller is gone, dropping the slot releases it
    }

    fn dialled(&mut self, made: Result<Arc<ApiConnection>, String>, now: Instant) {
        self.dialling = None;
        match made {
            Ok(connection) => self.opened(connection, now),
            Err(cause) => self.failed(cause, now),
        }
    }

    fn opened(&mut self, connection: Arc<ApiConnection>, now: Instant) {
        let gate = std::mem::take(&mut self.gate);
        if gate.failures > 0 {
            info!(pool = self.kind.label(), "API server is reachable again");
        }
        self.shared.reached.send_modify(|count| *count += 1);
        let is_recovering = gate.is_recovering || gate.failures > 0;
        self.gate.spread = if is_recovering { Some(now + SPREAD) } else { gate.spread };
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let age = match self.kind {
            TrafficType::Watch => AGE[0] + (AGE[1] - AGE[0]).mul_f64(rand::random()),
            TrafficType::Beat | TrafficType::Unary => Duration::from_secs(365 * 24 * 3600),
        };
        debug!(
            pool = self.kind.label(),
            id = connection.id,
            http2 = connection.is_http2(),
            "Connected to the API server"
        );
        let (over, events) = (connection.over.clone(), self.sender.clone());
        self.shared.dialer.tasks.spawn(async move {
            over.cancelled().await;
            let _ = events.send(PoolEvent::Over); // the pool is gone
        });
        self.connections.push(PooledConnection { connection, streams: 0, idle: now, retires: now + age, ends: None });
    }

    fn failed(&mut self, cause: String, now: Instant) {
        self.gate.failures = self.gate.failures.saturating_add(1);
        let pause = pause(self.kind, self.gate.failures, rand::random());
        self.gate.opens = Some(now + pause);
        self.shared.missed.send_replace(Some(self.kind));
        if self.gate.failures == 1 {
            warn!(pool = self.kind.label(), err = %cause, "Cannot connect to the API server");
        } else {
            debug!(pool = self.kind.label(), err = %cause, again = ?pause, "Cannot connect to the API server");
        }
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause.clone());
        if self.kind != TrafficType::Watch && self.loads().is_empty() {
            for ask in self.waiting.drain(..) {
                let _ = ask.reply.send(Err(Unavailable(cause.clone()))); // the caller is gone
            }
            // Callers will retry, and the connection should exist then.
            self.gate.is_wanted = true;
        }
        // If another connection is left, requests keep waiting for a slot, except those that avoid it.
        let avoiding = |ask: &mut SlotRequest| ask.want.avoid.is_some();
        for ask in self.waiting.extract_if(.., avoiding) {
            let _ = ask.reply.send(Err(Unavailable(cause.clone()))); // the caller is gone
        }
    }

    /// Another pool connected: dials at once, and abandons a dial that is older than [`STALE`].
    fn reached(&mut self, now: Instant) {
        self.gate.opens = None;
        if self.dialling.as_ref().is_some_and(|dialling| now.duration_since(dialling.begun) >= STALE) {
            self.dialling = None;
            self.gate.is_wanted = true;
        }
    }

    /// Another pool failed to connect: extends the back-off. The heartbeat pool probes for all.
    fn missed(&mut self, who: Option<TrafficType>, now: Instant) {
        if self.kind != TrafficType::Beat && who != Some(self.kind) && self.gate.opens.is_some() {
            self.gate.opens = Some(now + pause(self.kind, self.gate.failures, rand::random()));
        }
    }

    /// Closes idle connections that cannot be pinged (HTTP/1.1).
    fn close_unpingable(&mut self) {
        for pooled in self.connections.iter().filter(|pooled| pooled.streams == 0 && !pooled.connection.is_http2()) {
            pooled.connection.closed.cancel();
        }
    }

    fn happened(&mut self, event: PoolEvent, now: Instant) {
        let (id, is_fit) = match event {
            PoolEvent::Back { id, is_fit } => (id, is_fit),
            PoolEvent::Renew => return self.renew(now),
            PoolEvent::Over => return,
        };
        if let Some(pooled) = self.connections.iter_mut().find(|pooled| pooled.connection.id == id) {
            pooled.streams = pooled.streams.saturating_sub(1);
            pooled.idle = now;
            if !is_fit {
                pooled.connection.closed.cancel();
                // It did not answer a heartbeat.
                if self.kind == TrafficType::Beat {
                    self.shared.dialer.pinger.trigger();
                }
            }
        }
    }

    /// Drains all connections after a change of identity or authorities.
    fn renew(&mut self, now: Instant) {
        for pooled in self.connections.iter_mut().filter(|pooled| pooled.ends.is_none()) {
            drain(pooled, now);
        }
        // The change may fix the cause of the last failure.
        (self.dialling, self.gate.opens) = (None, None);
    }
}

fn drain(pooled: &mut PooledConnection, now: Instant) {
    pooled.ends = Some(pooled.ends.unwrap_or(now + DRAIN));
    pooled.connection.draining.cancel();
}

async fn dialled(dialling: &mut Option<DialInProgress>) -> Result<Arc<ApiConnection>, String> {
    match dialling {
        Some(dialling) => dialling.outcome.as_mut().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::sleep;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::transport::{dialer::Pings, keep_alive_pinger::KeepAlivePinger};
    use berth_metrics::Registry;

    /// A port without a listener.
    fn nowhere() -> SharedPoolState {
        let dialer = Dialer {
            host: "127.0.0.1".to_owned(),
            port: 1,
            tls: None,
            proxy: None,
            pings: Pings { idle: Duration::from_secs(30), patience: Duration::from_secs(15) },
            pinger: KeepAlivePinger::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            attempts: AtomicU64::new(0),
        };
        SharedPoolState {
            dialer: Arc::new(dialer),
            metrics: ApiClientMetrics::new(&Registry::new()),
            epoch: watch::channel(0).1,
            reached: watch::Sender::new(0),
            missed: watch::Sender::new(None),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_is_asked_by_few() {
        // AC-10-43: ten minutes with 200 watches and continuous heartbeats and writes.
        let (shared, stop) = (nowhere(), CancellationToken::new());
        let attempts = || shared.dialer.attempts.load(Ordering::Relaxed);
        let make = |kind| {
            let (pool, task) = pool(kind, shared.clone());
            tokio::spawn(task.run(stop.clone()));
            Arc::new(pool)
        };
        let pools = [TrafficType::Beat, TrafficType::Unary, TrafficType::Watch].map(make);
        let end = Instant::now() + Duration::from_secs(600);
        for (pool, callers, rest) in [(&pools[0], 2, 1), (&pools[1], 20, 1), (&pools[2], 200, 0)] {
            for _ in 0..callers {
                let pool = pool.clone();
                tokio::spawn(async move {
                    while Instant::now() < end {
                        let latest = if rest == 0 { end } else { Instant::now() + Duration::from_secs(10) };
                        assert!(pool.take(SlotRequirements::default(), latest).await.is_err(), "no server");
                        sleep(Duration::from_secs(rest)).await;
                    }
                });
            }
        }
        sleep(Duration::from_secs(300)).await;
        let before = attempts();
        sleep(Duration::from_secs(299)).await;
        let made = attempts() - before;
        assert!((20..=60).contains(&made), "{made} attempts in five minutes");
        stop.cancel();
    }
}
