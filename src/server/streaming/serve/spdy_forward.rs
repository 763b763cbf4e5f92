//! Port-forward over SPDY: many connections, a pair of streams each (spec 04b §3.2).

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::debug;

use super::{
    Manner,
    forwarding::{Broken, ClientSide, ToClient, forward},
    spdy_command::over,
};
use crate::server::{
    ports::targets::PodPorts,
    streaming::spdy::{
        Incoming, Limits, Sender, Stream,
        pairing::{self, Half, Pairs, Step},
    },
};

/// Streams of a connection at once: two for each forward.
const STREAMS: usize = 256;
/// How often it is looked for halves that stay alone.
const LOOK: Duration = Duration::from_secs(5);

/// Serves a connection to its end.
pub async fn serve<T: AsyncRead + AsyncWrite + Send + Unpin>(io: T, pod: Box<dyn PodPorts>, manner: Manner) {
    let limits = Limits { idle: manner.idle, ping: None, streams: STREAMS };
    over(io, limits, async |_connection, incoming| Forwards::new(&*pod).run(incoming).await).await;
}

/// All forwards of a connection.
struct Forwards<'a> {
    pod: &'a dyn PodPorts,
    pairs: Pairs,
    /// Halves that wait for the other one, by request.
    halves: HashMap<String, Stream>,
    /// Where each request is told what goes wrong.
    errors: HashMap<String, Sender>,
    running: FuturesUnordered<BoxFuture<'a, String>>,
}

impl<'a> Forwards<'a> {
    fn new(pod: &'a dyn PodPorts) -> Self {
        let (halves, errors) = (HashMap::new(), HashMap::new());
        Self { pod, pairs: Pairs::default(), halves, errors, running: FuturesUnordered::new() }
    }

    async fn run(mut self, mut incoming: Incoming) {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                stream = incoming.recv() => match stream {
                    Some(stream) => self.arrived(stream).await,
                    None => return,
                },
                Some(request) = self.running.next() => self.ended(&request),
                now = look.tick(), if !self.halves.is_empty() => self.look(now).await,
            }
        }
    }

    async fn arrived(&mut self, stream: Stream) {
        match self.pairs.arrive(stream.id(), stream.headers(), Instant::now().into_std()) {
            Step::Reset(why) => debug!(err = why, "A stream of a port-forward was refused"),
            Step::Taken { request, text } => {
                if let Some(error) = self.errors.get(&request) {
                    let _ = error.write(Bytes::from(text)).await; // or the connection has ended
                }
            }
            Step::Wait { request, half } => {
                self.note(&request, half, &stream).await;
                self.halves.insert(request, stream);
            }
            Step::Connect { request, half, port } => {
                self.note(&request, half, &stream).await;
                // Both tables know the same requests.
                let Some(first) = self.halves.remove(&request) else { return self.ended(&request) };
                let (data, error) = if half == Half::Data { (stream, first) } else { (first, stream) };
                let pod = self.pod;
                self.running.push(async move { connect(pod, port, data, error).map(|()| request).await }.boxed());
            }
        }
    }

    async fn note(&mut self, request: &str, half: Half, stream: &Stream) {
        let _ = stream.accept().await; // or the connection has ended
        if half == Half::Error {
            self.errors.insert(request.to_owned(), stream.sender());
        }
    }

    fn ended(&mut self, request: &str) {
        self.pairs.ended(request);
        self.errors.remove(request);
    }

    /// Lets go of halves whose other one did not come.
    async fn look(&mut self, now: Instant) {
        for request in self.pairs.overdue(now.into_std()) {
            if let Some(error) = self.errors.remove(&request) {
                let text = format!("(conn={}, request={request}) timed out waiting for streams", self.pod.sandbox());
                let _ = error.write(Bytes::from(text)).await; // or the connection has ended
            }
            self.halves.remove(&request);
        }
    }
}

/// One forward. What goes wrong ends it and nothing else.
async fn connect(pod: &dyn PodPorts, port: u16, mut data: Stream, mut error: Stream) {
    match pod.dial(port).await {
        Ok(tcp) => {
            let sender = data.sender();
            forward(tcp, &mut data, sender).await;
        }
        Err(why) => {
            let text = pairing::failed(port, pod.sandbox(), &why);
            let _ = error.write(Bytes::from(text)).await; // or the connection has ended
        }
    }
    let _ = error.finish().await;
}

impl ClientSide for Stream {
    async fn read(&mut self) -> Result<Option<Bytes>, Broken> {
        Stream::read(self).await.map_err(|_| Broken)
    }
}

impl ToClient for Sender {
    async fn write(&self, bytes: Bytes) -> Result<(), Broken> {
        Sender::write(self, bytes).await.map_err(|_| Broken)
    }

    async fn finish(self) -> Result<(), Broken> {
        Sender::finish(self).await.map_err(|_| Broken)
    }
}
