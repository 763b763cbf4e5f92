//! Ports of this machine's loopback, and what clients say to them through a pod.

use bytes::Bytes;
use futures::StreamExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::clients::{Spdy, all};
use crate::reservation::free_ports;

/// The length of a page.
const PAGE: usize = 40_000;

/// Ports.
pub struct Ports {
    /// Answers `pong` to five bytes, and ends.
    pub line: u16,
    /// Answers with how much it was asked, once all of the question was asked.
    pub whole: u16,
    /// Answers five bytes with 40,000 bytes, and ends.
    pub page: u16,
    /// Nobody listens.
    pub closed: u16,
}

impl Ports {
    /// Opens them; they are served as long as the test's runtime runs.
    pub async fn open() -> Self {
        let line = served(|mut tcp| async move {
            let mut question = [0; 5];
            if tcp.read_exact(&mut question).await.is_ok() {
                let _ = tcp.write_all(b"pong\n").await; // who asked may have gone
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

    /// A closed port, then an open one, on one connection. What is said of the closed one.
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

    /// That many requests over one connection, so many at a time: none is lost.
    pub async fn all_are_answered(&self, client: &Spdy, count: usize, at_a_time: usize) {
        let one = async |number: usize| {
            let (mut data, mut error) = client.pair(self.page, &number.to_string()).await;
            data.write(Bytes::from_static(b"ping\n")).await.expect("sent");
            let length = all(&mut data).await.len();
            let (finished, said) = (data.finish().await, all(&mut error).await);
            let ends = (data.read().await, error.read().await);
            assert!(length == PAGE && said.is_empty(), "request {number}: {length} bytes, {said:?}, ends {ends:?}");
            finished.expect("sent");
        };
        futures::stream::iter((0..count).map(one)).buffer_unordered(at_a_time).count().await;
    }

    /// Many at once; each is answered only once it was told that nothing more comes.
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

/// A port whose every connection is served so.
async fn served<F: Future<Output = ()> + Send + 'static>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(serve(tcp));
        }
    });
    port
}
