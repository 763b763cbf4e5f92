//! Credential plugins as processes, in real time: a paused clock would pass their limit at once.

use std::{fs, path::Path, sync::Arc};

use berth::{engine::ports::Clock, images::PluginFlags};

use crate::images::room::{Choice, ImagesRoom, simple};
use berth_testkit::{clock::TokioClock, scripted::ScriptedCri};

/// A room with one plugin for `*.io`: the shell, running `script`.
async fn room(script: &str) -> ImagesRoom {
    let dir = Arc::new(tempfile::tempdir().expect("a directory"));
    let path = |name: &str| dir.path().join(name);
    fs::write(path("script"), script.replace("@DIR@", &dir.path().display().to_string())).expect("written");
    fs::create_dir(path("bin")).expect("made");
    std::os::unix::fs::symlink("/bin/sh", path("bin/acr")).expect("linked");
    let config = format!(
        "kind: CredentialProviderConfig\napiVersion: kubelet.config.k8s.io/v1\nproviders:\n- name: acr\n  \
         apiVersion: credentialprovider.kubelet.k8s.io/v1\n  matchImages: ['*.io']\n  defaultCacheDuration: 0s\n  \
         args: ['{}']\n  env: [{{name: GREETING, value: hello}}]\n",
        path("script").display()
    );
    fs::write(path("plugins.yaml"), config).expect("written");
    let plugins = Some(PluginFlags { config: path("plugins.yaml"), bin_dir: path("bin") });
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
    let choice = Choice { plugins, ..Choice::default() };
    ImagesRoom::at(ScriptedCri::new(clock.clone()), clock, dir, choice).await
}

fn answer(scope: &str) -> String {
    format!(
        "cat >> @DIR@/asked; echo >> @DIR@/asked; echo '{{\"kind\":\"CredentialProviderResponse\",\
         \"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"{scope}\",\"cacheDuration\":\"5m\",\
         \"auth\":{{\"*.io\":{{\"username\":\"'$GREETING'\",\"password\":\"p\"}}}}}}'"
    )
}

fn asked(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(dir.join("asked")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn one_answer_serves_a_registry() {
    // AC-03b-13
    let room = room(&answer("Registry")).await;
    room.ensure(simple("r.io/a:1")).await.expect("pulled");
    room.ensure(simple("r.io/b:1")).await.expect("pulled");
    room.ensure(simple("other.example/c:1")).await.expect("pulled");
    assert_eq!(room.pulled_as(), ["hello", "hello", ""]);
    let request = "{\"kind\":\"CredentialProviderRequest\",\"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\
                   \"image\":\"r.io/a\"}";
    assert_eq!(asked(room.dir.path()), [request]);
    assert!(room.registry.gather().iter().any(|f| f.name() == "kubelet_credential_provider_config_info"));
}

#[tokio::test]
async fn an_image_s_answer_serves_that_image() {
    let room = room(&answer("Image")).await;
    for image in ["r.io/a:1", "r.io/a:2", "r.io/b:1"] {
        room.ensure(simple(image)).await.expect("pulled");
    }
    assert_eq!(asked(room.dir.path()).len(), 2);
}

#[tokio::test]
async fn junk_and_failures_leave_the_pull_anonymous() {
    // AC-03b-14
    for (script, errors) in [("cat > /dev/null; echo junk with a secret", 0.0), ("echo oops >&2; exit 3", 1.0)] {
        let room = room(script).await;
        room.ensure(simple("r.io/a")).await.expect("pulled");
        assert_eq!(room.pulled_as(), [""]);
        assert_eq!(room.counter("kubelet_credential_provider_plugin_errors_total", &[("plugin_name", "acr")]), errors);
        assert!(room.events().iter().all(|event| !event.contains("secret")));
    }
}
