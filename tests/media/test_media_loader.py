import asyncio
import threading

import pytest

from image_files import animation, data_url, encoded, noise
from outrider.media import loader as loader_module
from outrider.media.decoder import MediaDecoder
from outrider.media.images import image_from_pixels
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.loader import MediaItem, MediaLoader
from patience import Hurdle, goes_on_while_held, until, wait_until


def image(seed: int = 0) -> MediaItem:
    return MediaItem("image", data_url(encoded(noise(seed=seed))))


def load(wanted, limits=None, use=lambda image: image.digest):
    loader = MediaLoader(limits or MediaLimits(), use)
    try:
        return asyncio.run(loader.load(wanted))
    finally:
        loader.close()


def test_images_come_in_order_and_equal_ones_have_equal_digests():
    digests = [image_from_pixels(noise(seed=seed)).digest for seed in (0, 1)]
    found = load([image(0), image(1), MediaItem("image", data_url(encoded(noise(), "BMP"), "image/bmp"))])
    assert found == [[digests[0]], [digests[1]], [digests[0]]]


def test_a_videos_frames_count_as_images():
    video = MediaItem("video", data_url(animation(4), "image/gif"))
    limits = MediaLimits(max_frames=3, max_images=3)
    assert [len(frames) for frames in load([video], limits)] == [3]
    with pytest.raises(InvalidMedia, match="4 images"):
        load([image(), video], limits)
    with pytest.raises(InvalidMedia, match="4 images"):
        load([image()] * 4, limits)


def test_one_bad_image_refuses_them_all_and_leaves_nothing_running():
    before = threading.active_count()

    async def go():
        loader = MediaLoader(MediaLimits(), lambda image: image)
        with pytest.raises(InvalidMedia):
            await loader.load([image(), MediaItem("image", "data:image/png;base64,AAAA"), image()])
        assert len(asyncio.all_tasks()) == 1
        loader.close()

    asyncio.run(go())
    wait_until(lambda: threading.active_count() <= before + 1)  # asyncio's own


def test_decoding_runs_off_the_event_loop_two_at_a_time():
    running, most, hurdle = [], [], Hurdle()

    def use(image):
        running.append(threading.current_thread())
        most.append(len(running))
        hurdle.stop()
        running.pop()

    async def go():
        loader = MediaLoader(MediaLimits(), use)
        work = asyncio.create_task(loader.load([image(seed) for seed in range(6)]))
        await until(lambda: len(running) == 2)
        await goes_on_while_held(hurdle)
        await work
        loader.close()

    asyncio.run(go())
    assert max(most) == 2


def test_the_event_loops_thread_never_decodes(monkeypatch):
    threads = []

    def watch(owner, work):
        real = getattr(owner, work)

        def watched(*args):
            threads.append(threading.current_thread())
            return real(*args)

        monkeypatch.setattr(owner, work, watched)

    watch(loader_module, "read_inline")
    for work in ("decode_image", "count_frames", "decode_frames"):
        watch(MediaDecoder, work)
    jpeg = MediaItem("image", data_url(encoded(noise(), "JPEG"), "image/jpeg"))
    load([jpeg, MediaItem("video", data_url(animation(2), "image/gif"))])
    assert len(threads) == 5
    assert all(thread.name.startswith("outrider-media") for thread in threads)


def test_all_fetches_together_have_a_time_limit(monkeypatch):
    async def never(url, limits):
        await asyncio.sleep(60)

    monkeypatch.setattr(loader_module, "fetch", never)
    with pytest.raises(InvalidMedia, match=r"within 0\.2 s"):
        load([MediaItem("image", "http://host/a.png")] * 3, MediaLimits(fetch_total_s=0.2))
