//! In-process streaming server: WebSocket port-forward, two channels per port (spec 04b §4.1).

use bytes::Bytes;
use futures::{SinkExt, StreamExt, stream::SplitStream};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior},
};
use tokio_tungstenite::tungstenite::Message;

use super::{
    ServeOptions,
    codec::{ChannelProtocol, ClientMessage},
    forwarding::{ClientSide, ForwardError, ToClient, forward},
};
use crate::{
    ports::stream_targets::PodPorts,
    streaming::{
        spdy::pairing,
        websocket::{
            channels,
            handshake::Socket,
            translator::{close_with_message, idle_timeout},
        },
    },
};

/// Maximum number of ports: each uses two channels, and one channel is reserved for half-closing others.
pub const MOST_PORTS: usize = 127;
/// Capacity of the message queues, to the client and to each port.
const WAITING: usize = 8;

/// Serves a WebSocket until all ports have ended.
pub async fn serve(
    socket: Socket,
    pod: Box<dyn PodPorts>,
    (protocol, ports): (ChannelProtocol, Vec<u16>),
    manner: ServeOptions,
) {
    let (mut to, from) = socket.split();
    for greeting in channels::port_greetings(&ports) {
        let Some((&channel, port)) = greeting.split_first() else { continue };
        if to.send(protocol.write(channel, port)).await.is_err() {
            return;
        }
    }
    let active = watch::channel(Instant::now()).0;
    let (messages, mut outgoing) = mpsc::channel(WAITING);
    let (inputs, connections): (Vec<_>, Vec<_>) = ports
        .iter()
        .zip((0..=u8::MAX).step_by(2))
        .map(|(&port, channel)| {
            let (input, received) = mpsc::channel(WAITING);
            let client = ToChannel { protocol, channel, messages: messages.clone() };
            (input, connect(&*pod, port, received, client))
        })
        .unzip();
    drop(messages);
    let all = futures::future::join_all(connections);
    let mut client = ForwardClient { from, protocol, inputs, active: active.clone() };
    let outward = async {
        let mut beat = tokio::time::interval(manner.heartbeat);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beat.reset();
        loop {
            let message = tokio::select! {
                message = outgoing.recv() => match message {
                    Some(message) => message,
                    // All ports have ended and their data is sent.
                    None => return,
                },
                _ = beat.tick() => Message::Ping(Bytes::new()),
            };
            if !message.is_ping() {
                active.send_replace(Instant::now());
            }
            if to.send(message).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        ((), _) = async { tokio::join!(outward, all) } => {}
        () = client.pass_on() => {}
        () = idle_timeout(manner.idle, active.subscribe()) => {}
    }
    close_with_message(to, client.from, None).await;
}

/// Receiving half of the client's WebSocket.
struct ForwardClient {
    from: SplitStream<Socket>,
    protocol: ChannelProtocol,
    inputs: Vec<mpsc::Sender<Bytes>>,
    active: watch::Sender<Instant>,
}

impl ForwardClient {
    /// Passes data on to the ports; returns when the client disconnects.
    async fn pass_on(&mut self) {
        while let Some(Ok(message)) = self.from.next().await {
            self.active.send_replace(Instant::now());
            let mut bytes = match self.protocol.read(message) {
                ClientMessage::Channel(bytes) => bytes,
                ClientMessage::Nothing => continue,
                ClientMessage::End => return,
            };
            let channel = usize::from(bytes.split_to(1).first().copied().unwrap_or_default());
            // Odd channels carry only our error texts, and higher ones were not requested.
            let Some(input) = self.inputs.get(channel / 2).filter(|_| channel % 2 == 0) else { continue };
            let _ = input.send(bytes).await; // the port may have ended
        }
    }
}

async fn connect(pod: &dyn PodPorts, port: u16, mut received: mpsc::Receiver<Bytes>, client: ToChannel) {
    match pod.dial(port).await {
        Ok(tcp) => forward(tcp, &mut received, client).await,
        Err(why) => {
            let text = pairing::failed(port, pod.sandbox(), &why);
            let error = ToChannel { channel: client.channel.saturating_add(1), ..client };
            let _ = error.write(Bytes::from(text)).await; // the client may be gone
        }
    }
}

impl ClientSide for mpsc::Receiver<Bytes> {
    async fn read(&mut self) -> Result<Option<Bytes>, ForwardError> {
        Ok(self.recv().await)
    }
}

/// Data of a port for the client. The protocol cannot half-close a channel: the end of the pod's data ends the forward.
struct ToChannel {
    protocol: ChannelProtocol,
    channel: u8,
    messages: mpsc::Sender<Message>,
}

impl ToClient for ToChannel {
    async fn write(&self, bytes: Bytes) -> Result<(), ForwardError> {
        self.messages.send(self.protocol.write(self.channel, &bytes)).await.map_err(|_| ForwardError)
    }

    async fn finish(self) -> Result<(), ForwardError> {
        Err(ForwardError)
    }
}
