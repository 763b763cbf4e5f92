//! Misbehaving HTTP server: hangs, endless bodies, redirects, garbage.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
};

/// Scripted response.
#[derive(Clone)]
pub enum Answer {
    /// Status and body.
    Plain(u16, String),
    /// 302 redirect to that location.
    Redirect(&'static str),
    /// Never responds.
    Hang,
    /// Announces 10 GiB and sends as much as the client reads.
    Endless,
    /// Bytes that are not HTTP.
    Garbage,
}

/// HTTP server with scripted responses.
pub struct Server {
    address: SocketAddr,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    /// Heads of the requests, in order of arrival.
    pub heads: mpsc::UnboundedReceiver<String>,
    /// Number of bytes of endless responses that were written.
    pub sent: Arc<AtomicU64>,
}

impl Server {
    /// Starts a server that gives these responses in order; the last one repeats.
    pub async fn start(answers: impl IntoIterator<Item = Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("failed to listen on a port");
        let address = listener.local_addr().expect("failed to get the local address");
        let answers = Arc::new(Mutex::new(answers.into_iter().collect::<VecDeque<_>>()));
        let sent = Arc::new(AtomicU64::new(0));
        let (to_test, heads) = mpsc::unbounded_channel();
        let (queue, bytes) = (answers.clone(), sent.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, queue.clone(), bytes.clone(), to_test.clone()));
            }
        });
        Self { address, answers, heads, sent }
    }

    /// URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}/pods", self.address)
    }

    /// Port on loopback.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Appends a response.
    pub fn then(&self, answer: Answer) {
        self.answers.lock().expect("lock is poisoned").push_back(answer);
    }
}

async fn serve(
    stream: TcpStream,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    sent: Arc<AtomicU64>,
    heads: mpsc::UnboundedSender<String>,
) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let _ = heads.send(head);
    let answer = {
        let mut answers = answers.lock().expect("lock is poisoned");
        if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() }
    };
    let plain = |status: u16, more: &str, body: &str| {
        format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{more}\r\n{body}", body.len())
    };
    let text = match answer.expect("no response queued") {
        Answer::Plain(status, body) => plain(status, "", &body),
        Answer::Redirect(to) => plain(302, &format!("Location: {to}\r\n"), ""),
        Answer::Hang => return std::future::pending().await,
        Answer::Garbage => "\u{1}\u{2}nothing like HTTP\r\n\r\n".to_owned(),
        Answer::Endless => {
            let head = "HTTP/1.1 200 OK\r\nContent-Length: 10737418240\r\n\r\n";
            let _ = stream.write_all(head.as_bytes()).await;
            let chunk = vec![b'#'; 64 * 1024];
            while stream.write_all(&chunk).await.is_ok() {
                sent.fetch_add(64 * 1024, Ordering::Relaxed);
            }
            return;
        }
    };
    let _ = stream.write_all(text.as_bytes()).await;
}

/// 200 response with that body.
pub fn ok(body: impl Into<String>) -> Answer {
    Answer::Plain(200, body.into())
}
