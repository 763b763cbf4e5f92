//! critest's image cases, against Debian's `docker-registry` instead of public registries.
//!
//! Spec 09 §11.2 (AC-09-E1). Each comment `critest: …` is the name of one of its fifteen cases, of "Image Manager",
//! "Image Consistency" and "Image Identifier Consistency"; the last is of "Streaming List", which is in its main branch
//! only.

use std::{net::TcpListener, path::Path, time::Duration};

use berth_proto::cri;
use berth_runtime::images::platform;
use serde_json::json;
use tonic::{Code, Request};

use berth_testkit::embedded::{
    fixture::{RuntimeFixture, in_network_namespace},
    in_process::{Builtin, Daemon, container, daemon_with, pod, spec},
};

use crate::images::registry::{Registry, RegistryTransport, layer, obstacle};

/// Runs a test beside a registry; reports where it is skipped.
fn beside_a_registry<F: Future<Output = ()>>(test: &str, body: impl FnOnce(RuntimeFixture, Registry) -> F + Send) {
    if let Some(why) = obstacle() {
        assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
        println!("skipped: {test}: {why}");
        return;
    }
    in_network_namespace(test, |place| {
        let registry = Registry::start(place.path(), RegistryTransport::Plain);
        body(place, registry)
    });
}

async fn images_alone(place: &Path) -> Daemon {
    daemon_with(place, Builtin::Missing).await
}

fn push(registry: &Registry, repository: &str, tag: &str, user: &str, content: &str) -> String {
    let inherited = json!({"Cmd": ["/bin/true"], "User": user});
    let own = platform::host().architecture;
    let layers = [layer("what", content.as_bytes())];
    registry.push_with(repository, tag, inherited, (&own, &layers)).digest.to_string()
}

#[test]
fn public_images_are_pulled_and_removed_by_every_kind_of_name() {
    beside_a_registry("public_images_are_pulled_and_removed_by_every_kind_of_name", async |place, registry| {
        let host = registry.host();
        push(&registry, "test-image-latest", "latest", "", "latest");
        push(&registry, "test-image-tag", "test", "", "tag");
        let digest = push(&registry, "test-image-digest", "any", "", "digest");
        let daemon = images_alone(place.path()).await;
        for (asked, tags, digests) in [
            // critest: public image without tag should be pulled and removed
            (format!("{host}/test-image-latest"), vec![format!("{host}/test-image-latest:latest")], None),
            // critest: public image with tag should be pulled and removed
            (format!("{host}/test-image-tag:test"), vec![format!("{host}/test-image-tag:test")], None),
            // critest: public image with digest should be pulled and removed
            (
                format!("{host}/test-image-digest@{digest}"),
                vec![],
                Some(vec![format!("{host}/test-image-digest@{digest}")]),
            ),
        ] {
            let id = daemon.pull(&asked).await.expect("pulled");
            let image = daemon.image(&asked).await.expect("there");
            assert_eq!((&image.id, &image.repo_tags), (&id, &tags), "{asked}");
            assert!(image.size > 0 && image.repo_digests.len() == 1, "{image:?}");
            digests.into_iter().for_each(|digests| assert_eq!(image.repo_digests, digests));
            assert_eq!(daemon.images_of(&host).await, [image], "{asked}");
            daemon.remove_image(&asked).await;
            assert_eq!((daemon.image(&asked).await, daemon.images_of(&host).await), (None, vec![]), "{asked}");
        }
        daemon.stop.cancel();
    });
}

#[test]
fn a_pull_ends_when_its_time_is_up() {
    beside_a_registry("a_pull_ends_when_its_time_is_up", async |place, registry| {
        // critest: public image should timeout if requested
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let name = format!("{}/x:1", silent.local_addr().expect("bound"));
        let daemon = images_alone(place.path()).await;
        let mut request = Request::new(cri::PullImageRequest { image: spec(&name), ..Default::default() });
        request.set_timeout(Duration::from_millis(200));
        let pull = daemon.calls.images.clone();
        let pulled =
            tokio::time::timeout(Duration::from_secs(20), async move { pull.clone().pull_image(request).await });
        let error = pulled.await.expect("it ends").expect_err("nobody answers");
        assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled), "{error:?}");
        assert_eq!(daemon.image(&name).await, None);
        drop((silent, registry));
        daemon.stop.cancel();
    });
}

#[test]
fn image_status_resolves_all_names_and_has_the_user() {
    beside_a_registry("image_status_resolves_all_names_and_has_the_user", async |place, registry| {
        let host = registry.host();
        let daemon = images_alone(place.path()).await;
        let digest = push(&registry, "test-image-tag", "test", "", "tag");
        let id = daemon.pull(&format!("{host}/test-image-tag:test")).await.expect("pulled");
        // critest: image status should support all kinds of references
        for name in [
            id.clone(),
            id.trim_start_matches("sha256:").to_owned(),
            format!("{host}/test-image-tag:test"),
            format!("{host}/test-image-tag@{digest}"),
        ] {
            assert_eq!(daemon.image(&name).await.map(|image| image.id).as_ref(), Some(&id), "{name}");
        }
        // critest: image status get image fields should not have Uid|Username empty
        for (name, user, uid, username) in [
            ("uid", "1002", Some(1002), ""),
            ("username", "www-data", None, "www-data"),
            ("uid-group", "1003:1004", Some(1003), ""),
            ("username-group", "www-data:1004", None, "www-data"),
        ] {
            let name = format!("test-image-user-{name}");
            push(&registry, &name, "latest", user, user);
            let name = format!("{host}/{name}");
            daemon.pull(&name).await.expect("pulled");
            let image = daemon.image(&name).await.expect("there");
            assert_eq!((image.uid.map(|uid| uid.value), image.username.as_str()), (uid, username), "{name}");
        }
        daemon.stop.cancel();
    });
}

#[test]
fn lists_of_images_are_exact() {
    beside_a_registry("lists_of_images_are_exact", async |place, registry| {
        let host = registry.host();
        let daemon = images_alone(place.path()).await;
        let pull_all = async |names: &[String]| {
            for name in names {
                daemon.pull(name).await.expect("pulled");
            }
        };
        // critest: listImage should get exactly 3 image in the result list
        let names: Vec<String> = (1..=3).map(|n| format!("{host}/test-image-{n}:latest")).collect();
        (1..=3).for_each(|n| drop(push(&registry, &format!("test-image-{n}"), "latest", "", &n.to_string())));
        pull_all(&names).await;
        let listed = daemon.images_of(&host).await;
        let mut tags: Vec<String> = listed.iter().flat_map(|image| image.repo_tags.clone()).collect();
        tags.sort();
        assert_eq!((listed.len(), &tags), (3, &names));
        // critest (main branch): Streaming List, images
        let stream = daemon.calls.images.clone().stream_images(cri::StreamImagesRequest::default()).await;
        let (mut stream, mut streamed) = (stream.expect("a stream").into_inner(), Vec::new());
        while let Some(part) = stream.message().await.expect("a part") {
            streamed
                .extend(part.images.into_iter().filter(|image| image.repo_tags.iter().any(|t| t.starts_with(&host))));
        }
        assert_eq!(streamed, listed);
        for name in &names {
            daemon.remove_image(name).await;
        }
        // critest: listImage should get exactly 3 repoTags in the result image
        let names: Vec<String> = (1..=3).map(|n| format!("{host}/test-image-tags:{n}")).collect();
        (1..=3).for_each(|n| drop(push(&registry, "test-image-tags", &n.to_string(), "", "tags")));
        pull_all(&names).await;
        let listed = daemon.images_of(&host).await;
        let [image] = listed.as_slice() else { panic!("one: {listed:?}") };
        let mut tags = image.repo_tags.clone();
        tags.sort();
        assert_eq!(tags, names);
        // critest: removing image by one tag should remove all tags
        daemon.remove_image(&names[0]).await;
        for name in &names {
            assert_eq!(daemon.image(name).await, None, "{name}");
        }
        assert_eq!(daemon.images_of(&host).await, []);
        daemon.stop.cancel();
    });
}

#[test]
fn an_image_of_two_registries_is_one_image() {
    beside_a_registry("an_image_of_two_registries_is_one_image", async |place, first| {
        let elsewhere = tempfile::tempdir().expect("a directory");
        let second = Registry::start(elsewhere.path(), RegistryTransport::Plain);
        let names = [&first, &second].map(|registry| {
            push(registry, "pause", "3.9", "", "pause");
            format!("{}/pause:3.9", registry.host())
        });
        let daemon = images_alone(place.path()).await;
        let ids = [daemon.pull(&names[0]).await.expect("pulled"), daemon.pull(&names[1]).await.expect("pulled")];
        // critest: should return the same image identifier when pulled from different registries
        assert_eq!(ids[0], ids[1]);
        let image = daemon.image(&names[0]).await.expect("there");
        assert!(names.iter().all(|name| image.repo_tags.contains(name)), "{image:?}");
        assert_eq!(daemon.image(&names[1]).await, Some(image));
        // critest: removing image from one registry should remove all tags from other registries
        daemon.remove_image(&names[1]).await;
        for name in &names {
            assert_eq!(daemon.image(name).await, None, "{name}");
        }
        daemon.stop.cancel();
    });
}

#[test]
fn what_is_listed_is_there_and_what_is_there_is_listed() {
    beside_a_registry("what_is_listed_is_there_and_what_is_there_is_listed", async |place, registry| {
        let host = registry.host();
        let daemon = images_alone(place.path()).await;
        push(&registry, "a", "1", "", "a");
        let name = format!("{host}/a:1");
        let used = async || {
            let info = daemon.calls.images.clone().image_fs_info(cri::ImageFsInfoRequest::default()).await;
            let info = info.expect("answered").into_inner().image_filesystems;
            info.into_iter().filter_map(|info| info.used_bytes).map(|bytes| bytes.value).sum::<u64>()
        };
        assert!(used().await > 0, "busybox is there");
        for _ in 0..20 {
            // critest: should list and get image status immediately after pulling
            let id = daemon.pull(&name).await.expect("pulled");
            let listed: Vec<String> = daemon.images_of(&host).await.into_iter().map(|image| image.id).collect();
            assert_eq!((daemon.image(&name).await.map(|image| image.id), listed), (Some(id.clone()), vec![id]));
            // critest: should not list or get image status immediately after removal
            daemon.remove_image(&name).await;
            assert_eq!((daemon.image(&name).await, daemon.images_of(&host).await), (None, vec![]));
        }
        // critest: should not fail on simultaneous RemoveImage calls
        let id = daemon.pull(&name).await.expect("pulled");
        futures::future::join_all((0..10).map(|n| daemon.remove_image(if n % 2 == 0 { &name } else { &id }))).await;
        assert_eq!(daemon.image(&name).await, None);
        daemon.stop.cancel();
    });
}

#[test]
fn an_image_has_one_identifier_everywhere() {
    beside_a_registry("an_image_has_one_identifier_everywhere", async |place, registry| {
        // critest: should return the same image identifier across all APIs
        let host = registry.host();
        let daemon = images_alone(place.path()).await;
        push(&registry, "a", "1", "", "a");
        let name = format!("{host}/a:1");
        let id = daemon.pull(&name).await.expect("pulled");
        assert_eq!(daemon.image(&name).await.map(|image| image.id).as_ref(), Some(&id));
        assert_eq!(
            daemon.images_of(&host).await.into_iter().map(|image| image.id).collect::<Vec<_>>(),
            std::slice::from_ref(&id)
        );
        let sandbox = daemon.run(pod(place.path(), "i")).await;
        for asked in [&name, &id] {
            let config = cri::ContainerConfig { image: spec(asked), ..container("c", "true") };
            let container = daemon.calls.create(&sandbox, &config).await.expect("made");
            let status = daemon.status(&container).await;
            assert_eq!(status.image_id, id, "{asked}");
            let listed = daemon.calls.containers().await;
            assert!(listed.len() == 1 && listed.iter().all(|c| c.image_id == id), "{listed:?}");
            // A reference by which any registry can serve the same content (spec 09a §3).
            let digests = daemon.image(&id).await.expect("there").repo_digests;
            assert!(digests.contains(&status.image_ref), "{status:?}");
            daemon.calls.remove_container(&container).await.expect("goes");
        }
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}
