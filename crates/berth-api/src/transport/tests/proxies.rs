//! Connections through proxies of all protocols.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

use super::server::{Authority, Client, Server, Settings, acceptor, json};
use crate::{
    api::{ApiClient, ApiError, Call, Resource},
    transport::*,
};

/// Proxy, and the requests it received.
struct Proxy {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

/// Proxy protocol.
enum Speaks {
    Connect(Option<TlsAcceptor>),
    Socks,
}

impl Proxy {
    async fn start(speaks: Speaks) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (address, heads) = (listener.local_addr().expect("an address"), Arc::new(Mutex::new(Vec::new())));
        let (seen, speaks) = (heads.clone(), Arc::new(speaks));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (seen, speaks) = (seen.clone(), speaks.clone());
                // A dropped connection ends the task.
                tokio::spawn(async move { serve(client, &speaks, &seen).await });
            }
        });
        Self { address, heads }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().expect("whole").clone()
    }
}

async fn serve(client: TcpStream, speaks: &Speaks, heads: &Mutex<Vec<String>>) -> std::io::Result<()> {
    match speaks {
        Speaks::Connect(None) => connect(client, heads).await,
        Speaks::Connect(Some(tls)) => connect(tls.accept(client).await?, heads).await,
        Speaks::Socks => socks(client, heads).await,
    }
}

async fn connect(mut client: impl AsyncRead + AsyncWrite + Unpin, heads: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(client.read_u8().await?);
    }
    let head = String::from_utf8(head).expect("text");
    let target = head.split(' ').nth(1).expect("a target").to_owned();
    heads.lock().expect("whole").push(head);
    let mut server = TcpStream::connect(target).await?;
    client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
    client.flush().await?;
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}

/// RFC 1928, RFC 1929: names and IPv4, with and without a password.
async fn socks(mut client: TcpStream, heads: &Mutex<Vec<String>>) -> std::io::Result<()> {
    async fn bytes(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
        let length = client.read_u8().await?;
        let mut read = vec![0; length.into()];
        client.read_exact(&mut read).await?;
        Ok(read)
    }
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    assert_eq!(client.read_u8().await?, 5);
    let methods = bytes(&mut client).await?;
    let mut head = String::new();
    if methods.contains(&2) {
        client.write_all(&[5, 2]).await?;
        assert_eq!(client.read_u8().await?, 1);
        let (user, password) = (bytes(&mut client).await?, bytes(&mut client).await?);
        head = format!("{}:{}@", text(user), text(password));
        client.write_all(&[1, 0]).await?;
    } else {
        client.write_all(&[5, 0]).await?;
    }
    let mut request = [0; 4];
    client.read_exact(&mut request).await?;
    assert_eq!(request[..3], [5, 1, 0]);
    let host = match request[3] {
        1 => std::net::Ipv4Addr::from(client.read_u32().await?).to_string(),
        3 => text(bytes(&mut client).await?),
        other => panic!("address type {other}"),
    };
    let port = client.read_u16().await?;
    heads.lock().expect("whole").push(format!("{head}{host}:{port}"));
    let Ok(mut server) = TcpStream::connect((host, port)).await else {
        return client.write_all(&[5, 5, 0, 1, 0, 0, 0, 0, 0, 0]).await; // connection refused
    };
    client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
    copy_bidirectional(&mut client, &mut server).await.map(drop)
}

async fn ask(cluster: Cluster) -> Result<(), ApiError> {
    let client = Client::open(TransportConfig::new(cluster, User::default())).await;
    let call = Call::get(Resource::PODS, "ns", "p").within(std::time::Duration::from_secs(20));
    client.transport.call(call).await.map(drop)
}

#[tokio::test]
async fn a_proxy_on_the_way_is_asked() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let proxy = Proxy::start(Speaks::Connect(None)).await;
    let proxy_url = format!("http://u:s@{}", proxy.address);
    ask(Cluster { proxy_url, ..server.cluster() }).await.expect("by way of it");
    let expected =
        format!("CONNECT {0} HTTP/1.1\r\nHost: {0}\r\nProxy-Authorization: Basic dTpz\r\n\r\n", server.address);
    assert_eq!(proxy.heads(), [expected]);
}

#[tokio::test]
async fn a_proxy_within_tls_proves_itself() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let proxy = Proxy::start(Speaks::Connect(Some(acceptor(&server.authority, false)))).await;
    let proxy_url = format!("https://u:%73@{}", proxy.address);
    ask(Cluster { proxy_url, ..server.cluster() }).await.expect("by way of it");
    let expected =
        format!("CONNECT {0} HTTP/1.1\r\nHost: {0}\r\nProxy-Authorization: Basic dTpz\r\n\r\n", server.address);
    assert_eq!(proxy.heads(), [expected]);

    let stranger = Proxy::start(Speaks::Connect(Some(acceptor(&Authority::new("others"), false)))).await;
    let proxy_url = format!("https://u:secret@{}", stranger.address);
    let message = ask(Cluster { proxy_url, ..server.cluster() }).await.expect_err("untrusted").to_string();
    assert!(message.contains("proxyconnect tcp: tls:") && !message.contains("secret"), "{message}");
    assert!(stranger.heads().is_empty(), "no request is sent to it");
}

#[tokio::test]
async fn a_proxy_that_speaks_socks_is_asked() {
    let server = Server::start(Settings::default(), |_| json("{}")).await;
    let (port, proxy) = (server.address.port(), Proxy::start(Speaks::Socks).await);
    let by_name = Cluster { server: format!("https://localhost:{port}"), ..server.cluster() };
    for (cluster, proxy_url, expected) in [
        (server.cluster(), format!("socks5://{}", proxy.address), format!("127.0.0.1:{port}")),
        // The proxy resolves names that the client cannot.
        (by_name, format!("socks5h://u:s%40@{}", proxy.address), format!("u:s@@localhost:{port}")),
    ] {
        ask(Cluster { proxy_url, ..cluster }).await.expect("by way of it");
        assert_eq!(proxy.heads().last(), Some(&expected));
    }
    let gone = Cluster {
        server: "https://127.0.0.1:1".to_owned(),
        proxy_url: format!("socks5://{}", proxy.address),
        ..server.cluster()
    };
    let message = ask(gone).await.expect_err("nobody is there").to_string();
    assert!(message.contains("socks connect tcp") && message.contains("Connection refused"), "{message}");
}
