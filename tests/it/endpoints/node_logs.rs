//! `/logs/` file serving and the node log query.

use std::{
    fs,
    io::Read,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    sync::Arc,
};

use axum::response::Response;
use berth::serving::node_logs::MachineLogs;
use berth_server::{ports::NodeLogs, routes::node_logs};

use crate::endpoints::{get, status_and_body};

/// A log directory, and a fake `journalctl` that knows `kubelet.service` and prints its arguments.
struct LogFixture {
    dir: tempfile::TempDir,
    logs: Arc<dyn NodeLogs>,
}

impl LogFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("log");
        fs::create_dir_all(root.join("pods/ns_web_u/main")).expect("makeable");
        fs::create_dir(root.join("containers")).expect("makeable");
        fs::create_dir(root.join("etcd")).expect("makeable");
        fs::create_dir(root.join("with index")).expect("makeable");
        fs::write(root.join("with index/index.html"), "<p>index</p>").expect("writable");
        fs::write(root.join("pods/ns_web_u/main/0.log"), "of a container\n").expect("writable");
        fs::write(root.join("syslog"), "0123456789").expect("writable");
        fs::write(root.join("crio.log"), "of crio\n").expect("writable");
        fs::write(root.join("etcd/etcd.log"), "of etcd\n").expect("writable");
        fs::write(root.join("<b>&\"'.log"), "odd name").expect("writable");
        symlink("../pods/ns_web_u/main/0.log", root.join("containers/web.log")).expect("makeable");
        symlink("/etc/shadow", root.join("x")).expect("makeable");
        nix::unistd::mkfifo(&root.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("makeable");
        let journalctl = dir.path().join("journalctl");
        let script = "#!/bin/sh\nif [ \"$1\" = --field ]; then echo kubelet.service; echo init.scope; exit 0; fi\n\
                      for word; do echo \"<$word>\"; done\necho trouble >&2\nexit 1\n";
        fs::write(&journalctl, script).expect("writable");
        fs::set_permissions(&journalctl, fs::Permissions::from_mode(0o755)).expect("ours");
        let logs = Arc::new(MachineLogs::new(root, journalctl));
        Self { dir, logs }
    }

    fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("log")
    }

    async fn respond(&self, path: &str, query: &str, headers: &[(&str, &str)]) -> Response {
        let query = if query.is_empty() { String::new() } else { format!("?{query}") };
        node_logs::read(&self.logs, true, &get(&format!("/logs/{query}"), headers), path).await
    }

    async fn ask(&self, path: &str, query: &str) -> (u16, String) {
        let (status, body) = status_and_body(self.respond(path, query, &[]).await).await;
        (status, String::from_utf8(body).expect("text"))
    }
}

#[tokio::test]
async fn files_are_served_and_nothing_leads_out() {
    // AC-04-23
    let fixture = LogFixture::new();
    let missing = (404, "404 page not found\n".to_owned());
    for path in [
        "x",
        "fifo",
        "nothing",
        "syslog/x",
        "../secret",
        "../../../../etc/passwd",
        "%2e%2e/secret",
        "a\0b",
        "containers/../../secret",
        "/etc/passwd",
        "\u{0}",
    ] {
        assert_eq!(fixture.ask(path, "").await, missing, "{path:?}");
    }
    for (path, body) in [
        ("syslog", "0123456789"),
        ("containers/web.log", "of a container\n"),
        ("pods/../syslog", "0123456789"),
        ("with index/", "<p>index</p>"),
    ] {
        assert_eq!(fixture.ask(path, "").await, (200, body.to_owned()), "{path}");
    }
    let syslog = fixture.respond("syslog", "", &[]).await;
    let header = |name: &str| syslog.headers()[name].to_str().expect("text").to_owned();
    assert_eq!(header("content-type"), "text/plain; charset=utf-8");
    assert_eq!((header("content-length"), header("accept-ranges")), ("10".to_owned(), "bytes".to_owned()));
    assert!(syslog.headers().contains_key("last-modified"));
}

#[tokio::test]
async fn directories_are_listed_and_paths_put_right() {
    let fixture = LogFixture::new();
    let (status, page) = fixture.ask("", "").await;
    let expected = "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n\
                    <a href=\"%3Cb%3E&amp;%22%27.log\">&lt;b&gt;&amp;&#34;&#39;.log</a>\n\
                    <a href=\"containers/\">containers/</a>\n<a href=\"crio.log\">crio.log</a>\n<a href=\"etcd/\">etcd/</a>\n\
                    <a href=\"fifo\">fifo</a>\n<a href=\"pods/\">pods/</a>\n<a href=\"syslog\">syslog</a>\n\
                    <a href=\"with%20index/\">with index/</a>\n<a href=\"x\">x</a>\n</pre>\n";
    assert_eq!((status, page.as_str()), (200, expected));
    for (path, query, location) in [
        ("etcd", "", "etcd/"),
        ("pods/ns_web_u", "a=b", "ns_web_u/?a=b"),
        ("with index", "", "with%20index/"),
        ("etcd/index.html", "", "./"),
        ("syslog/", "", "../syslog"),
    ] {
        let response = fixture.respond(path, query, &[]).await;
        assert_eq!(
            (response.status().as_u16(), &response.headers()["location"]),
            (301, &location.parse().expect("a value")),
            "{path}"
        );
    }
    let modified = fixture.respond("etcd/", "", &[]).await.headers()["last-modified"].clone();
    let since = [("if-modified-since", modified.to_str().expect("text"))];
    assert_eq!(fixture.respond("etcd/", "", &since).await.status(), 304);
}

#[tokio::test]
async fn parts_of_files_and_what_has_not_changed() {
    let fixture = LogFixture::new();
    for (header, status, body, range) in [
        ("bytes=2-4", 206, "234", Some("bytes 2-4/10")),
        ("bytes=-3", 206, "789", Some("bytes 7-9/10")),
        ("bytes=8-", 206, "89", Some("bytes 8-9/10")),
        ("bytes=0-1,4-5", 200, "0123456789", None),
        ("bytes=10-", 416, "invalid range: failed to overlap\n", Some("bytes */10")),
        ("bytes=5-2", 416, "invalid range\n", None),
    ] {
        let response = fixture.respond("syslog", "", &[("range", header)]).await;
        let shown = response.headers().get("content-range").map(|v| v.to_str().expect("text").to_owned());
        assert_eq!(shown.as_deref(), range, "{header}");
        assert_eq!(status_and_body(response).await, (status, body.as_bytes().to_vec()), "{header}");
    }
    let modified = fixture.respond("syslog", "", &[]).await.headers()["last-modified"].clone();
    let modified = modified.to_str().expect("text");
    assert_eq!(
        status_and_body(fixture.respond("syslog", "", &[("if-modified-since", modified)]).await).await,
        (304, vec![])
    );
    let both = [("if-range", "Mon, 12 Jan 1970 13:46:40 GMT"), ("range", "bytes=2-4")];
    assert_eq!(fixture.respond("syslog", "", &both).await.status(), 200);
    let both = [("if-range", modified), ("range", "bytes=2-4")];
    assert_eq!(fixture.respond("syslog", "", &both).await.status(), 206);
}

#[tokio::test]
async fn what_may_not_be_read_is_forbidden() {
    if nix::unistd::geteuid().is_root() {
        println!("skipped what_may_not_be_read_is_forbidden: root may read everything");
        return;
    }
    let fixture = LogFixture::new();
    fs::set_permissions(fixture.root().join("syslog"), fs::Permissions::from_mode(0o000)).expect("ours");
    assert_eq!(fixture.ask("syslog", "").await, (403, "403 Forbidden\n".to_owned()));
}

#[tokio::test]
async fn services_are_found_in_the_journal_or_in_files() {
    // AC-04-22
    let fixture = LogFixture::new();
    let (status, text) = fixture.ask("", "query=kubelet").await;
    let journal = "<--utc>\n<--no-pager>\n<--output=short-precise>\n<--unit=kubelet>\ntrouble\n";
    assert_eq!((status, text.as_str()), (200, journal), "standard error is part of the answer");
    let (_, text) = fixture.ask("", "query=kubelet&tailLines=3&pattern=a%20%24(reboot)&boot=-1").await;
    for word in ["<--lines=3>", "<--grep=a $(reboot)>", "<--boot>", "<-1>"] {
        assert!(text.contains(word), "{word} not in {text}");
    }
    for (query, body) in [
        ("query=crio", "of crio\n"),
        ("query=etcd&query=syslog", "of etcd\n0123456789"),
        ("query=nobody", "\nlog not found for nobody\n"),
        ("query=x", "\nlog not found for x\n"),
        ("query=fifo", "\nlog not found for fifo\n"),
        ("query=..", "\nlog not found for ..\n"),
        (
            "query=crio&query=etcd&tailLines=1",
            "\noptions present and query resolved to log files for [crio etcd]\ntry without specifying options\n",
        ),
        ("query=/crio.log", "of crio\n"),
    ] {
        assert_eq!(fixture.ask("", query).await, (200, body.to_owned()), "{query}");
    }
    let response = fixture.respond("", "query=kubelet", &[("accept-encoding", "gzip")]).await;
    assert_eq!(response.headers()["content-encoding"], "gzip");
    assert_eq!(response.headers()["content-type"], "text/plain;charset=UTF-8");
    let mut text = String::new();
    let (_, zipped) = status_and_body(response).await;
    flate2::read::GzDecoder::new(zipped.as_slice()).read_to_string(&mut text).expect("gzip");
    assert_eq!(text, journal);
    let mixed = [("accept-encoding", "gzip, deflate")];
    assert!(!fixture.respond("", "query=kubelet", &mixed).await.headers().contains_key("content-encoding"));
}

#[tokio::test]
async fn invalid_queries_report_the_reason() {
    // AC-04-22
    let fixture = LogFixture::new();
    let root = fixture.root();
    let gone = format!("query: Invalid value: [\"/nope.log\"]: stat {}: no such file or directory\n", shown(&root));
    for (path, query, status, body) in [
        ("a", "query=kubelet", 406, "path not allowed in query mode\n"),
        ("", "query=", 400, "query: Invalid value: [\"\"]: query cannot be empty\n"),
        ("", "tailLines=1", 406, "query: Required value: cannot be empty with options\n"),
        ("", "query=/nope.log", 406, gone.as_str()),
        ("", "query=a;b", 406, "query: Invalid value: \"a;b\": input contains unsupported characters\n"),
    ] {
        assert_eq!(fixture.ask(path, query).await, (status, body.to_owned()), "{path}?{query}");
    }
    for file in ["query=/x", "query=/../../../etc/passwd", "query=/fifo"] {
        assert_eq!(fixture.ask("", file).await.0, 406, "{file}");
    }
    // With the feature off, the query string is ignored.
    let response = node_logs::read(&fixture.logs, false, &get("/logs/?query=kubelet", &[]), "").await;
    assert!(status_and_body(response).await.1.starts_with(b"<!doctype html>"));
}

fn shown(root: &Path) -> String {
    root.join("nope.log").display().to_string()
}

#[tokio::test]
async fn a_machine_without_a_journal_has_files() {
    let fixture = LogFixture::new();
    let logs: Arc<dyn NodeLogs> = Arc::new(MachineLogs::new(fixture.root(), "/nonexistent/journalctl"));
    let response = node_logs::read(&logs, true, &get("/logs/?query=crio&query=kubelet", &[]), "").await;
    assert_eq!(status_and_body(response).await, (200, b"of crio\n\nlog not found for kubelet\n".to_vec()));
}

#[tokio::test]
async fn a_reader_who_leaves_ends_the_journal() {
    let fixture = LogFixture::new();
    let endless = fixture.dir.path().join("endless");
    let pid = fixture.dir.path().join("pid");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = --field ]; then echo kubelet.service; exit 0; fi\necho $$ > {}\nexec yes\n",
        pid.display()
    );
    fs::write(&endless, script).expect("writable");
    fs::set_permissions(&endless, fs::Permissions::from_mode(0o755)).expect("ours");
    let logs: Arc<dyn NodeLogs> = Arc::new(MachineLogs::new(fixture.root(), endless));
    let response = node_logs::read(&logs, true, &get("/logs/?query=kubelet", &[]), "").await;
    let mut body = response.into_body();
    let first = http_body_util::BodyExt::frame(&mut body).await.expect("a frame").expect("bytes");
    assert!(first.data_ref().is_some_and(|bytes| bytes.starts_with(b"y\n")));
    drop(body);
    let process = format!("/proc/{}", fs::read_to_string(&pid).expect("it ran").trim());
    let gone = async {
        while fs::read_to_string(format!("{process}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), gone).await.expect("journalctl is killed");
}
