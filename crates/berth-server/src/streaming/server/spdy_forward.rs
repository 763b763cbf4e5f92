//! In-process streaming server: SPDY port-forward, two streams per forward (spec 04b §3.2).

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, Shared},
    stream::FuturesUnordered,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::debug;

use super::{
    ServeOptions,
    forwarding::{ClientSide, ForwardError, ToClient, forward},
    spdy_command::serve_connection,
};
use crate::{
    ports::stream_targets::PodPorts,
    streaming::spdy::{
        ConnectionLimits, IncomingStreams, Sender, SpdyStream,
        pairing::{self, PairHalf, PairingAction, Pairs},
    },
};

/// Limit of open streams of a connection: two per forward. kubectl uses one connection for all its forwards.
const STREAMS: usize = 2048;
/// Interval of the check for overdue unpaired streams.
const OVERDUE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Serves a connection to its end.
pub async fn serve<T: AsyncRead + AsyncWrite + Send + Unpin>(io: T, pod: Box<dyn PodPorts>, manner: ServeOptions) {
    let limits = ConnectionLimits { idle: manner.idle, ping: None, streams: STREAMS };
    serve_connection(io, limits, async |_connection, incoming| Forwards::new(&*pod).run(incoming).await).await;
}

/// Stream that waits for the other half of its pair, with the future of its SYN_REPLY.
struct UnpairedStream {
    stream: SpdyStream,
    accepted: Shared<BoxFuture<'static, ()>>,
}

/// All forwards of a connection.
///
/// Only futures in `running` wait for permits of the outgoing queue: the semaphore grants permits in order, so a task
/// that awaits one without polling earlier waiters would deadlock.
struct Forwards<'a> {
    pod: &'a dyn PodPorts,
    pairs: Pairs,
    /// Unpaired streams by request ID.
    unpaired: HashMap<String, UnpairedStream>,
    /// Error streams by request ID.
    errors: HashMap<String, Sender>,
    /// Forwards, which return their request ID when they end, and frames to send, which return `None`.
    running: FuturesUnordered<BoxFuture<'a, Option<String>>>,
}

impl<'a> Forwards<'a> {
    fn new(pod: &'a dyn PodPorts) -> Self {
        let (unpaired, errors) = (HashMap::new(), HashMap::new());
        Self { pod, pairs: Pairs::default(), unpaired, errors, running: FuturesUnordered::new() }
    }

    async fn run(mut self, mut incoming: IncomingStreams) {
        let mut check_timer = interval(OVERDUE_CHECK_INTERVAL);
        check_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Back-pressure on a client that opens streams and does not read.
            let has_room = self.running.len() < 2 * STREAMS;
            tokio::select! {
                stream = incoming.recv(), if has_room => match stream {
                    Some(stream) => self.arrived(stream),
                    None => return,
                },
                Some(request) = self.running.next() => if let Some(request) = request {
                    self.ended(&request);
                },
                now = check_timer.tick(), if !self.unpaired.is_empty() => self.drop_overdue(now),
            }
        }
    }

    fn arrived(&mut self, stream: SpdyStream) {
        match self.pairs.arrive(stream.id(), stream.headers(), Instant::now().into_std()) {
            PairingAction::Reset(why) => debug!(err = why, "Rejected port-forward stream"),
            PairingAction::Taken { request, text } => {
                if let Some(error) = self.errors.get(&request) {
                    self.send(error.clone(), text, None);
                }
            }
            PairingAction::Wait { request, half } => {
                let accepted = self.accept(&request, half, &stream);
                let reply = accepted.clone();
                self.running.push(async move { reply.map(|()| None).await }.boxed());
                self.unpaired.insert(request, UnpairedStream { stream, accepted });
            }
            PairingAction::Connect { request, half, port } => {
                let second = self.accept(&request, half, &stream);
                // `pairs` and `unpaired` have the same request IDs.
                let Some(first) = self.unpaired.remove(&request) else { return self.ended(&request) };
                let UnpairedStream { stream: other, accepted } = first;
                let (data, error) = if half == PairHalf::Data { (stream, other) } else { (other, stream) };
                let pod = self.pod;
                let forward = async move {
                    // A stream must be accepted before anything is sent on it.
                    accepted.await;
                    second.await;
                    connect(pod, port, data, error).await;
                    Some(request)
                };
                self.running.push(forward.boxed());
            }
        }
    }

    /// Records the error stream of the request; returns the future that accepts the stream.
    fn accept(&mut self, request: &str, half: PairHalf, stream: &SpdyStream) -> Shared<BoxFuture<'static, ()>> {
        if half == PairHalf::Error {
            self.errors.insert(request.to_owned(), stream.sender());
        }
        let sender = stream.sender();
        // Fails only when the connection has ended.
        async move {
            let _ = sender.accept().await;
        }
        .boxed()
        .shared()
    }

    /// Sends a text, then drops `reset`, which resets that stream.
    fn send(&self, to: Sender, text: String, reset: Option<UnpairedStream>) {
        let sent = async move {
            let _ = to.write(Bytes::from(text)).await; // fails only when the connection has ended
            drop(reset);
            None
        };
        self.running.push(sent.boxed());
    }

    fn ended(&mut self, request: &str) {
        self.pairs.ended(request);
        self.errors.remove(request);
    }

    /// Drops streams whose other half is overdue.
    fn drop_overdue(&mut self, now: Instant) {
        for request in self.pairs.overdue(now.into_std()) {
            let unpaired = self.unpaired.remove(&request);
            if let Some(error) = self.errors.remove(&request) {
                let text = format!("(conn={}, request={request}) timed out waiting for streams", self.pod.sandbox());
                self.send(error, text, unpaired);
            }
        }
    }
}

/// Runs one forward. An error ends only this forward.
async fn connect(pod: &dyn PodPorts, port: u16, mut data: SpdyStream, mut error: SpdyStream) {
    match pod.dial(port).await {
        Ok(tcp) => {
            let sender = data.sender();
            forward(tcp, &mut data, sender).await;
        }
        Err(why) => {
            let text = pairing::failed(port, pod.sandbox(), &why);
            let _ = error.write(Bytes::from(text)).await; // fails only when the connection has ended
        }
    }
    let _ = error.finish().await;
}

impl ClientSide for SpdyStream {
    async fn read(&mut self) -> Result<Option<Bytes>, ForwardError> {
        SpdyStream::read(self).await.map_err(|_| ForwardError)
    }
}

impl ToClient for Sender {
    async fn write(&self, bytes: Bytes) -> Result<(), ForwardError> {
        Sender::write(self, bytes).await.map_err(|_| ForwardError)
    }

    async fn finish(self) -> Result<(), ForwardError> {
        Sender::finish(self).await.map_err(|_| ForwardError)
    }
}
