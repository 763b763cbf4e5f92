//! Clients of the runtime's socket connect to streams on loopback.

use std::path::Path;

use berth_proto::cri::{self, runtime_service_client::RuntimeServiceClient};
use berth_runtime::cri as services;
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tonic::transport::Endpoint;

use super::fixture::Streams;
use berth_testkit::{
    embedded::{
        fixture::{RuntimeFixture, in_network_namespace},
        in_process::{container, daemon, pod},
    },
    streams::clients::{LIMIT, all, ended, next, send_message},
};

#[test]
fn others_meet_streams_on_loopback_while_the_socket_is_served() {
    // AC-09-E1: streaming as in critest: over a socket, in a pod's network.
    in_network_namespace("others_meet_streams_on_loopback_while_the_socket_is_served", over_a_socket);
}

async fn over_a_socket(place: RuntimeFixture) {
    let daemon = daemon(place.path()).await;
    let streams = Streams::of(&daemon.runtime).await;
    let (endpoint, url) = (streams.endpoint, streams.url.clone());
    let (runtime, path) = (daemon.runtime.clone(), place.path().join("cri.sock"));
    let (at, begins, stopped) = (path.clone(), url.clone(), streams.stop.clone());
    let socket = tokio::spawn(async move { services::over_socket(&runtime, at, &begins, stopped).await });
    let client = |path: &Path| {
        let path = path.to_owned();
        let connector = tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        RuntimeServiceClient::new(Endpoint::from_static("http://socket").connect_with_connector_lazy(connector))
    };
    let mut rpc = client(&path);

    let mut config = pod(place.path(), "s");
    let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("given");
    context.namespace_options.as_mut().expect("given").network = cri::NamespaceMode::Pod.into();
    let sandbox = daemon.run(config).await;
    let script = "mkdir /tmp/w; echo served > /tmp/w/index.html; httpd -p 127.0.0.1:80 -h /tmp/w; \
                  httpd -p [::1]:81 -h /tmp/w; nc -ll -p 83 -e cat & while read line; do echo got $line; done";
    let id = daemon.start(&sandbox, cri::ContainerConfig { stdin: true, ..container("c", script) }).await;
    let met_at = |met: String| met.strip_prefix(&url).expect("on loopback").to_owned();

    let request = cri::ExecRequest {
        container_id: id[..13].to_owned(),
        cmd: ["sh", "-c", "tty; read line; echo $line"].map(str::to_owned).to_vec(),
        tty: true,
        stdin: true,
        stdout: true,
        stderr: false,
    };
    let met = met_at(rpc.exec(request.clone()).await.expect("prepared").into_inner().url);
    // critest 3: the validation suite leaves hundreds of connections open.
    let mut idle = Vec::new();
    for _ in 0..600 {
        idle.push(UnixStream::connect(&path).await.expect("it listens"));
    }
    let version = timeout(LIMIT, client(&path).version(cri::VersionRequest::default())).await.expect("in time");
    assert_eq!(version.expect("answered").into_inner().runtime_api_version, "v1");
    drop(idle);
    let spdy = endpoint.spdy(&met, &["v4.channel.k8s.io"]).await;
    let mut ends = spdy.command(&["error", "stdin", "stdout", "resize"]).await;
    ends["stdin"].write(Bytes::from("hello\n")).await.expect("sent");
    let printed = all(ends.get_mut("stdout").expect("open")).await;
    assert!(printed.contains("/dev/pts/0\r\n") && printed.ends_with("hello\r\n"), "{printed:?}");
    let attached = cri::AttachRequest { container_id: id, stdin: true, stdout: true, ..Default::default() };
    let met = met_at(rpc.attach(attached).await.expect("prepared").into_inner().url);
    let (_, mut joined) = endpoint.web_socket(&met, "v5.channel.k8s.io").await;
    assert_eq!(next(&mut joined).await, [1]);
    send_message(&mut joined, b"\0x\n").await;
    assert_eq!(next(&mut joined).await, b"\x01got x\n");

    let forward = cri::PortForwardRequest { pod_sandbox_id: sandbox.clone(), port: vec![80] };
    let met = met_at(rpc.port_forward(forward).await.expect("prepared").into_inner().url);
    let client = endpoint.spdy(&met, &["portforward.k8s.io"]).await;
    for (port, request) in [(80, "four"), (81, "six")] {
        let (mut data, _error) = client.pair(port, request).await;
        data.write(Bytes::from("GET / HTTP/1.0\r\n\r\n")).await.expect("sent");
        let page = all(&mut data).await;
        assert!(page.ends_with("served\n"), "{request}: {page}");
    }
    let (mut data, _error) = client.pair(83, "half").await;
    data.write(Bytes::from("echo")).await.expect("sent");
    data.finish().await.expect("sent");
    assert_eq!(all(&mut data).await, "echo");
    let (_data, mut error) = client.pair(82, "2").await;
    let text = all(&mut error).await;
    let begins = format!("failed to connect to localhost:82 inside namespace \"{sandbox}\", IPv4: ");
    assert!(text.contains(&begins) && text.contains("refused"), "{text}");

    // The streaming listener closes with the socket, and its streams with it.
    let late = met_at(rpc.exec(request).await.expect("prepared").into_inner().url);
    assert!(late.starts_with("/exec/"));
    streams.end().await;
    timeout(LIMIT, socket).await.expect("in time").expect("no panic").expect("served");
    assert!(TcpStream::connect(endpoint.0).await.is_err());
    ended(&mut joined).await;
    daemon.remove(&sandbox).await;
    place.assert_clean();
    daemon.stop.cancel();
}
