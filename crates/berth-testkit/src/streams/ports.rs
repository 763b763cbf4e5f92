//! Loopback TCP servers for port-forward tests, and checks through a forwarding client.

use bytes::Bytes;
use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::clients::{Spdy, all};
use crate::reservation::free_ports;

/// Size of the page in bytes.
const PAGE: usize = 40_000;

/// Ports of the test servers.
pub struct Ports {
    /// Responds to five bytes with `pong`, and closes.
    pub line: u16,
    /// Responds with the size of the request, after the client has closed its side.
    pub whole: u16,
    /// Responds to five bytes with 40,000 bytes, and closes.
    pub page: u16,
    /// Port without a listener.
    pub closed: u16,
}

impl Ports {
    /// Starts the servers; they run as long as the test's tokio runtime.
    pub async fn open() -> Self {
        let line = served(|mut tcp| async move {
            let mut question = [0; 5];
            if tcp.read_exact(&mut question).await.is_ok() {
                let _ = tcp.write_all(b"pong\n").await; // the client may have closed
            }
        });
        let whole = served(|mut tcp| async move {
            let mut question = String::new();
            if tcp.read_to_string(&mut question).await.is_ok() {
                let _ = tcp.write_all(format!("pong to {}\n", question.len()).as_bytes()).await;
            }
        });
        let page = served(|mut tcp| async move {
            let mut question = [0; 5];
            if tcp.read_exact(&mut question).await.is_ok() {
                let _ = tcp.write_all(&[b'x'; PAGE]).await; // likewise
            }
        });
        let [closed] = free_ports();
        Self { line: line.await, whole: whole.await, page: page.await, closed }
    }

    /// Forwards to a closed port, then to an open one on the same connection; returns the error text of the closed
    /// one.
    pub async fn a_closed_one_ends_nothing(&self, client: &Spdy) -> String {
        let (mut data, mut error) = client.pair(self.closed, "0").await;
        let text = all(&mut error).await;
        assert!(text.starts_with(&format!("error forwarding port {} to pod ", self.closed)), "{text}");
        assert_eq!(all(&mut data).await, "");
        let (mut data, mut error) = client.pair(self.line, "1").await;
        data.write(Bytes::from_static(b"ping\n")).await.expect("sent");
        assert_eq!(all(&mut data).await, "pong\n");
        data.finish().await.expect("sent");
        assert_eq!(all(&mut error).await, "");
        text
    }

    /// Sends `count` requests over one connection, `at_a_time` concurrently, and asserts that none is lost.
    pub async fn all_are_answered(&self, client: &Spdy, count: usize, at_a_time: usize) {
        let one = async |number: usize| {
            let (mut data, mut error) = client.pair(self.page, &number.to_string()).await;
            data.write(Bytes::from_static(b"ping\n")).await.expect("sent");
            let length = all(&mut data).await.len();
            let (finished, error_text) = (data.finish().await, all(&mut error).await);
            let ends = (data.read().await, error.read().await);
            assert!(
                length == PAGE && error_text.is_empty(),
                "request {number}: {length} bytes, {error_text:?}, ends {ends:?}"
            );
            finished.expect("sent");
        };
        futures::stream::iter((0..count).map(one)).buffer_unordered(at_a_time).count().await;
    }

    /// Opens many pairs at once; each gets its response only after its half-close.
    pub async fn half_closed_ones_are_answered(&self, client: &Spdy) {
        let mut pairs = Vec::new();
        for number in 2..20_usize {
            let (mut data, error) = client.pair(self.whole, &number.to_string()).await;
            data.write(Bytes::from(vec![b'x'; 1000 * number])).await.expect("sent");
            data.finish().await.expect("sent");
            pairs.push((number, data, error));
        }
        for (number, mut data, mut error) in pairs {
            assert_eq!(all(&mut data).await, format!("pong to {}\n", 1000 * number));
            assert_eq!(all(&mut error).await, "");
        }
    }
}

/// Starts a TCP server on a free port; returns the port.
async fn served<F: Future<Output = ()> + Send + 'static>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("failed to listen on a port");
    let port = listener.local_addr().expect("failed to get the local address").port();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(serve(tcp));
        }
    });
    port
}
